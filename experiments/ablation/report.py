"""What an ablation found, in numbers and in words: differences from the baseline, tables, the conclusion.

A difference rests on the seeds with which the runs of both arms ended and did not diverge. If these are not all
seeds, they may be the easy ones. If an arm's best learning rate was not found, the difference may be one of
tuning. Neither has a p-value, and the tables mark it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from experiments.ablation.grid import Cell, Outcomes
from experiments.ablation.outcome import Arm, BySeed, final_bpb, grouped
from experiments.ablation.rates import POINTS, WINDOW, Optimum
from experiments.statistics import ALPHA, Estimate, estimate, holm

NONE = "–"
INCOMPLETE = "†"  # beside a statistic that does not rest on all seeds
HOW_TO_READ = (
    "A statistic is a mean over n seeds ± the half-width of its 95% interval (Student's t). Differences from "
    "the first row are paired: as far as their shapes allow, each seed gives both arms the same initial weights "
    "and batches. Below zero is better. p tests for no difference (paired t test). All p-values of this report "
    "are corrected together (Holm); each interval is for one comparison: an arm whose interval lies between "
    "-0.01 and 0.01 is as good as the baseline, up to 0.01. `detectable` is about the smallest true difference "
    "that so many seeds show in four of five experiments, with the strictest correction; for two or three seeds "
    "it is too small, by up to a quarter. These statistics are about chance in seeds, not about other texts. A "
    "run diverged if its loss was not finite, or ended above that of a uniform prediction.",
    f"{INCOMPLETE} Some seeds are missing, because a run diverged or has not ended. The others may be the easy "
    "ones, so their mean is not comparable and has no p.",
)


# --- numbers ---------------------------------------------------------------------------------------------------------


@dataclass
class Finding:
    """A mean over seeds, of losses or of differences. It has a p-value if it can be tested."""

    estimate: Estimate | None  # None if no seed is left
    planned: int  # seeds it should rest on
    tuned: bool = True  # whether the optimum of every arm in it is known
    values: Sequence[float] = ()  # one for each seed
    p: float | None = None  # tests "the mean is 0", corrected for all findings of a report

    @property
    def complete(self) -> bool:
        return self.estimate is not None and self.estimate.n == self.planned

    def __str__(self) -> str:
        """What a sentence says of the first arm of a difference, compared with the second."""
        found = self.estimate
        if found is None or not self.complete:
            return f"is not compared ({'runs diverged or have not ended' if self.planned else 'no seed in common'})"
        if found.mean == 0 and not found.half_width:
            return "has the same losses"
        if not self.tuned:
            return "is not compared (the best learning rate was not found)"
        if self.p is None:
            side = "above" if found.mean > 0 else "below"
            return f"ended {abs(found.mean):.4f} {side}, which a single seed cannot tell from chance"
        if self.p < ALPHA:
            return f"is {'worse' if found.mean > 0 else 'better'} by {abs(found.mean):.4f} ± {found.half_width:.4f}"
        alone = found.low > 0 or found.high < 0  # significant before it is corrected
        return f"{'may differ' if alone else 'is indistinguishable'} ({found}, p = {self.p:.2g})"


def compare(
    bpb: Mapping[Arm, BySeed],
    planned: Mapping[Arm, Collection[int]],
    regrets: Mapping[Arm, float | None] = {},
) -> dict[Arm, Finding]:
    """The difference of each arm from the first, paired by seed.

    `planned` are the seeds of each arm, with those of runs that diverged or have not ended. `regrets` is what the
    error of an arm's learning rate is expected to cost, None if the best rate was not found. Holm's method
    corrects all p-values together. One that is missing counts as a comparison that found nothing: which runs
    diverge is chance too, so they must not make the correction of the others milder.
    """
    baseline, *others = bpb
    found = {}
    for arm in others:
        costs = [regrets.get(each, 0.0) for each in (arm, baseline)]
        values = [bpb[arm][seed] - bpb[baseline][seed] for seed in sorted(bpb[arm].keys() & bpb[baseline].keys())]
        measured = estimate(values, sum(cost or 0.0 for cost in costs), len(others)) if values else None
        pairs = len(set(planned[arm]) & set(planned[baseline]))
        each = found[arm] = Finding(measured, pairs, None not in costs, values)
        if measured and each.complete and each.tuned:
            each.p = measured.p
    corrected = holm([1.0 if each.p is None else each.p for each in found.values()])
    for each, p in zip(found.values(), corrected, strict=True):
        each.p = None if each.p is None else p
    return found


# --- Markdown --------------------------------------------------------------------------------------------------------


def comparison_section(
    cells: Sequence[Cell], outcomes: Outcomes, optima: Mapping[Arm, Optimum] = {}
) -> tuple[dict[Arm, Finding], list[str]]:
    """What is found of the planned `cells`, an arm at one learning rate each, and the text: first the conclusion.

    `optima` are given if learning rates were searched for.
    """
    lrs = {cell.arm: cell.lr for cell in cells}
    runs = {arm: [outcomes[cell] for cell in cells if cell in outcomes and cell.arm == arm] for arm in lrs}
    bpb = {arm: final_bpb(ended) for arm, ended in runs.items()}
    seeds = grouped((cell.arm, cell.seed) for cell in cells)
    known = {arm: each.regret if each.holds(bpb[arm].values()) else None for arm, each in optima.items()}
    found = compare(bpb, seeds, known)
    rows = []
    for arm, ended in runs.items():
        levels = dict(arm.factors) | {"lr": f"{lrs[arm]:g}"}  # `compare` may have lr as a factor
        difference = found.get(arm, Finding(None, 0))
        diverged = f"{sum(run.diverged for run in ended)} of {len(ended)}"
        rows.append([*levels.values(), mean_of(bpb[arm], len(seeds[arm])), *columns_of(difference), diverged])
    baseline, lr = next(iter(lrs.items()))
    titles = [name.replace("_", " ") for name in levels]
    titles += ["val_bpb (n)", f"paired difference from {baseline.name} (n)", "detectable", "p", "diverged"]
    conclusion = ""
    if found:
        parts = [f"{arm.name} {finding}" for arm, finding in found.items()]
        conclusion = f"Compared with {baseline.name}: {'; '.join(parts)}."
    if pairs := sorted({finding.estimate.n for finding in found.values() if finding.estimate}):
        rates = f"all at learning rate {lr:g}" if len(set(lrs.values())) == 1 else "each at its own learning rate"
        conclusion += f" In bits per byte (val_bpb), n = {' or '.join(map(str, pairs))}, {rates}."
    return found, [conclusion, "## Comparison", missing(cells, outcomes), table(titles, rows)]


def columns_of(finding: Finding) -> list[str]:
    """A difference, what is detectable, and p."""
    detectable = p = NONE
    if finding.complete and finding.estimate and finding.estimate.detectable is not None:
        detectable = f"{finding.estimate.detectable:.4f}"
    if finding.p is not None:
        p = f"{finding.p:.2g}" if finding.p >= 1e-4 else "< 0.0001"
    return [statistic(finding), detectable, p]


def statistic(finding: Finding, spec: str = "+.4f") -> str:
    """`1.7642 ± 0.0031 (3)`, or `1.7642 ± 0.0031 (2 of 3)†` if it does not rest on all seeds; a dash for none."""
    if finding.estimate is None:
        return NONE
    n = finding.estimate.n
    return f"{finding.estimate:{spec}} " + (f"({n})" if finding.complete else f"({n} of {finding.planned}){INCOMPLETE}")


def mean_of(values: BySeed, planned: int) -> str:
    return statistic(Finding(estimate([*values.values()]) if values else None, planned), ".4f")


def sweep_section(cells: Sequence[Cell], outcomes: Outcomes, optima: Mapping[Arm, Optimum]) -> list[str]:
    """A row per arm and a column per learning rate. `optima` is empty before all runs have ended."""
    lrs = sorted({cell.lr for cell in cells})
    rows = []
    for arm in dict.fromkeys(cell.arm for cell in cells):
        row = [arm.name]
        for lr in lrs:
            tried = [cell for cell in cells if (cell.arm, cell.lr) == (arm, lr)]
            row.append(mean_of(final_bpb(outcomes[cell] for cell in tried if cell in outcomes), len(tried)))
        best = regret = NONE
        if optima:
            best = f"{optima[arm].lr:g}"
            regret = "optimum not found" if optima[arm].regret is None else f"{optima[arm].regret:.4f}"
        rows.append([*row, best, regret])
    return [
        "## Learning rates",
        missing(cells, outcomes),
        "val_bpb on seeds that are not reported. An arm is reported at the vertex of a parabola through the losses "
        f"within {WINDOW:.3f} bits per byte (0.1 nats) of the lowest, of at least {POINTS} rates. The regret is what "
        "an error of the vertex is expected to cost: intervals are wider by it, and p-values count only what is "
        f"beyond. If fewer than {POINTS} rates are that close, or the vertex is not among them, no optimum is found. "
        "The arm is then reported at its best rate and has no p-value, because other arms may be closer to their "
        "optimum. The same holds if its reported seeds end, on average, further than that from the parabola.",
        table(["arm", *(f"{lr:g}" for lr in lrs), "reported at", "regret"], rows),
    ]


def missing(cells: Sequence[Cell], outcomes: Outcomes) -> str:
    ended = sum(cell in outcomes for cell in cells)
    return f"**Partial: {ended} of {len(cells)} runs have ended.**" if ended < len(cells) else ""


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(line)} |" for line in (titles, *rows))
    return "\n".join([first, "|---" * len(titles) + "|", *others])
