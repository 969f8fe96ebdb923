"""What the runs of an ablation say: paired differences from the baseline, and interactions of factors.

Both rest on the seeds with which all their runs ended and none diverged. Where these are not all seeds, the survivors
may be the easy ones: such a statistic has no p-value, and the tables mark it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.ablation.outcome import Arm, BySeed, paired
from experiments.statistics import Estimate, equivalence_p, estimate, holm


@dataclass(frozen=True)
class Finding:
    """A statistic over seeds, with p-values that are corrected for all findings of a table."""

    estimate: Estimate | None  # None if no seed is left
    planned: int  # seeds it should rest on
    p: float | None = None  # of "the mean is 0"
    equivalence_p: float | None = None  # of "the mean is at least the margin away from 0"

    @property
    def complete(self) -> bool:
        return self.estimate is not None and self.estimate.n == self.planned


def compare(bpb: Mapping[Arm, BySeed], seeds: int, margin: float | None = None) -> dict[Arm, Finding]:
    """The difference of each arm from the first, paired by seed. With `margin`, also tested for equivalence."""
    baseline, *others = bpb
    return find({arm: paired(bpb[arm], bpb[baseline]) for arm in others}, seeds, margin)


def interactions(bpb: Mapping[Arm, BySeed], seeds: int) -> dict[str, Finding]:
    """How much more (above 0) or less two changes raise val_bpb together than the sum of what each does alone.

    For every arm that differs from the first in two factors, if there are arms with each of these changes alone.
    """
    baseline, values = next(iter(bpb)), {}
    for arm in bpb:
        changed = [pair for pair in arm.factors if pair not in baseline.factors]
        alone = [Arm.of(**dict(baseline.factors) | dict([pair])) for pair in changed]
        if len(changed) == 2 and all(each in bpb for each in alone):
            one, other = alone
            name = " × ".join(Arm((pair,)).name for pair in changed)
            values[name] = paired(paired(bpb[arm], bpb[other]), paired(bpb[one], bpb[baseline]))
    return find(values, seeds)


def find(values: Mapping[Any, BySeed], seeds: int, margin: float | None = None) -> dict[Any, Finding]:
    """A finding for each set of differences. Holm's method corrects the p-values.

    One without a p-value counts as a comparison that found nothing: which runs diverge is chance too, so they must not
    make the correction of the others milder.
    """
    whole = {key: len(found) == seeds for key, found in values.items()}
    means = {key: mean_of(found) for key, found in values.items()}
    p = {key: found.p if found and whole[key] else None for key, found in means.items()}
    equivalent = dict.fromkeys(values)
    if margin is not None:
        equivalent = {key: equivalence_p(list(values[key].values()), margin) if whole[key] else None for key in values}
    corrected = [dict(zip(values, _correct(list(raw.values())), strict=True)) for raw in (p, equivalent)]
    return {key: Finding(means[key], seeds, *(found[key] for found in corrected)) for key in values}


def _correct(p_values: Sequence[float | None]) -> list[float | None]:
    corrected = holm([1.0 if p is None else p for p in p_values])
    return [None if p is None else found for p, found in zip(p_values, corrected, strict=True)]


def mean_of(values: BySeed) -> Estimate | None:
    return estimate(list(values.values())) if values else None
