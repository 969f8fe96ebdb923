"""What the runs of an ablation say: means, paired differences from the baseline, interactions of factors.

Means, differences and interactions rest on the seeds with which all their runs ended and none diverged. Where these are
not all seeds, the survivors may be the easy ones: such a statistic has no p-value, and the tables mark it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from experiments.ablation.grid import Cell
from experiments.ablation.outcome import Arm, Outcome, final_bpb, paired_differences
from experiments.statistics import Estimate, differences_of_differences, equivalence_p, estimate, holm

Outcomes = Mapping[Cell, Outcome]  # of the cells that have ended


@dataclass(frozen=True)
class Finding:
    """A statistic over seeds, with p-values that are corrected for all findings of a table."""

    estimate: Estimate | None  # None if no seed is left
    planned: int  # seeds it should rest on
    p: float | None = None  # of "the mean is 0"
    equivalence_p: float | None = None  # of "the mean is at least the margin away from 0"

    @property
    def n(self) -> int:
        """The number of seeds it rests on."""
        return self.estimate.n if self.estimate else 0

    @property
    def complete(self) -> bool:
        return self.n == self.planned


@dataclass(frozen=True)
class ArmResult:
    """An arm at one learning rate."""

    arm: Arm
    lr: float
    ended: int
    diverged: int
    bpb: Finding  # final val_bpb
    difference: Finding | None  # from the baseline, paired by seed; None for the baseline


@dataclass(frozen=True)
class Interaction:
    """How much more (above 0) or less two changes raise val_bpb together than the sum of what each does alone."""

    changes: tuple[str, str]
    baseline: Arm
    difference: Finding


def compare(cells: Iterable[Cell], outcomes: Outcomes, margin: float | None = None) -> list[ArmResult]:
    """Each arm of the planned `cells`, in their order. The first arm is the baseline, each arm has one learning rate.

    With `margin`, in val_bpb, the differences are also tested for equivalence.
    """
    planned = cells_by_arm(cells)
    runs = {arm: ended(arm_cells, outcomes) for arm, arm_cells in planned.items()}
    baseline, *others = planned
    seeds = len(planned[baseline])
    differences = find([paired_differences(runs[arm], runs[baseline]) for arm in others], seeds, margin)
    results = []
    for (arm, arm_cells), difference in zip(planned.items(), [None, *differences], strict=True):
        bpb = list(final_bpb(runs[arm]).values())
        mean = Finding(estimate(bpb) if bpb else None, seeds)
        diverged = sum(run.diverged for run in runs[arm])
        results.append(ArmResult(arm, arm_cells[0].lr, len(runs[arm]), diverged, mean, difference))
    return results


def interactions(cells: Iterable[Cell], outcomes: Outcomes) -> list[Interaction]:
    """Every pair of levels of two factors against the first level of each, the other factors at their first level.

    Combinations of which one of the four arms is missing are left out.
    """
    planned = cells_by_arm(cells)
    bpb = {arm: final_bpb(ended(planned[arm], outcomes)) for arm in planned}
    levels: dict[str, list[str]] = {}
    for arm in planned:
        for factor, level in arm.factors:
            if level not in levels.setdefault(factor, []):
                levels[factor].append(level)
    baseline = {factor: found[0] for factor, found in levels.items()}
    pairs, values = [], []
    for one, other in combinations(levels, 2):
        for a in levels[one][1:]:
            for b in levels[other][1:]:
                corners: tuple[dict[str, str], ...] = ({one: a, other: b}, {other: b}, {one: a}, {})
                arms = [Arm.of(**baseline | changes) for changes in corners]
                if all(arm in planned for arm in arms):
                    pairs.append((Arm.of(**{one: a}).name, Arm.of(**{other: b}).name))
                    values.append(differences_of_differences(*(bpb[arm] for arm in arms)))
    findings = find(values, seeds=len(next(iter(planned.values()))))
    return [Interaction(pair, Arm.of(**baseline), finding) for pair, finding in zip(pairs, findings, strict=True)]


def find(values: Sequence[Sequence[float]], seeds: int, margin: float | None = None) -> list[Finding]:
    """A finding for each list of differences, which should have `seeds` values each. Holm corrects the p-values.

    The correction counts all findings, also those that have no p-value.
    """
    estimates = [estimate(found) if found else None for found in values]
    complete = [len(found) == seeds for found in values]
    p = correct([e.p if e and whole else None for e, whole in zip(estimates, complete, strict=True)])
    equivalence: list[float | None] = [None] * len(values)
    if margin is not None:
        equivalence = correct(
            [equivalence_p(found, margin) if whole else None for found, whole in zip(values, complete, strict=True)]
        )
    return [Finding(e, seeds, *found) for e, *found in zip(estimates, p, equivalence, strict=True)]


def correct(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction over all of `p_values`: one that is missing counts as a comparison that found nothing.

    Which runs diverge is chance too, so they must not make the correction of the other comparisons milder.
    """
    corrected = holm([1.0 if p is None else p for p in p_values])
    return [None if p is None else found for p, found in zip(p_values, corrected, strict=True)]


def cells_by_arm(cells: Iterable[Cell]) -> dict[Arm, list[Cell]]:
    arms: dict[Arm, list[Cell]] = {}
    for cell in cells:
        arms.setdefault(cell.arm, []).append(cell)
    return arms


def ended(cells: Iterable[Cell], outcomes: Outcomes) -> list[Outcome]:
    """The outcomes of those of `cells` that have ended."""
    return [outcomes[cell] for cell in cells if cell in outcomes]
