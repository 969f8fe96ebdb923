"""What the runs of an ablation say: paired differences from the baseline.

They rest on the seeds with which all their runs ended and none diverged. Where these are not all seeds, the survivors
may be the easy ones, and where an arm's best learning rate was not found, a difference may be one of tuning: such a
statistic has no p-value, and the tables mark it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from experiments.ablation.outcome import Arm, BySeed
from experiments.statistics import ALPHA, Estimate, estimate, holm


@dataclass
class Finding:
    """A difference over seeds, with a p-value that is corrected for all findings of a report."""

    estimate: Estimate | None  # None if no seed is left
    planned: int  # seeds it should rest on
    tuned: bool = True  # whether the optimum of every arm in it is known
    values: Sequence[float] = ()  # by seed
    p: float | None = None  # of "the mean is 0"

    @property
    def complete(self) -> bool:
        return self.estimate is not None and self.estimate.n == self.planned

    def __str__(self) -> str:
        """In words: what is shown of the first arm of a difference, compared with the second."""
        found = self.estimate
        if found and found.mean == 0 and not found.half_width:
            return "has the same losses"
        if self.p is None or found is None:
            if found and self.complete and self.tuned:
                side = "above" if found.mean > 0 else "below"
                return f"ended {abs(found.mean):.4f} {side}, which a single seed cannot tell from chance"
            reason = "runs diverged or have not ended" if self.planned else "no seed in common"
            if self.complete:
                reason = "the best learning rate was not found"
            return f"is not compared ({reason})"
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

    `planned` are the seeds of each arm, with those of runs that diverged or have not ended. `regrets` is what the error
    of an arm's learning rate is expected to cost, None if the best rate was not found. Holm's method corrects all
    p-values together. One that is missing counts as a comparison that found nothing: which runs diverge is chance too,
    so they must not make the correction of the others milder.
    """
    baseline, *others = bpb
    found = {}
    for arm in others:
        costs = [regrets.get(each, 0.0) for each in (arm, baseline)]
        slack = sum(cost or 0.0 for cost in costs)
        values = [bpb[arm][seed] - bpb[baseline][seed] for seed in sorted(bpb[arm].keys() & bpb[baseline].keys())]
        pairs = len(set(planned[arm]) & set(planned[baseline]))
        measured = estimate(values, slack, len(others)) if values else None
        each = found[arm] = Finding(measured, pairs, None not in costs, values)
        if measured and each.complete and each.tuned:
            each.p = measured.p
    corrected = holm([1.0 if each.p is None else each.p for each in found.values()])
    for each, p in zip(found.values(), corrected, strict=True):
        if each.p is not None:
            each.p = p
    return found
