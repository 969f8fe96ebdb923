"""Rules that several claims share. Differences are losses minus the baseline's, in nats; alpha is 0.05."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Judgment, Verdict
from experiments.claims.runs import nats
from experiments.statistics import equivalence_p, estimate, holm, noninferiority_p

ALPHA = 0.05


@dataclass(frozen=True)
class Comparison:
    """The statement that the mean of `values`, one per seed, is above or below `threshold`."""

    name: str
    values: Sequence[float]
    side: Literal["above", "below"]
    threshold: float = 0.0


def left_open(diverged: int) -> Judgment:
    """Open: a mean over the other runs would be of those that went well."""
    return Judgment(OPEN, "–", f"{diverged} of the reported runs diverged")


def all_of(comparisons: Sequence[Comparison], ours: str) -> Judgment:
    """Confirmed if each mean is on its stated side, refuted if one is on the other side, else open.

    By two-sided t tests against the thresholds, corrected with Holm's method.
    """
    found = [estimate([value - each.threshold for value in each.values]) for each in comparisons]
    p_values: dict[Verdict, dict[str, float]] = {CONFIRMED: {}, REFUTED: {}, OPEN: {}}
    for each, difference, p in zip(comparisons, found, holm([difference.p for difference in found]), strict=True):
        assert p is not None  # at least two seeds
        stated = (difference.mean > 0) == (each.side == "above")
        p_values[OPEN if p >= ALPHA else CONFIRMED if stated else REFUTED][each.name] = p
    if refuted := p_values[REFUTED]:
        return Judgment(REFUTED, ours, f"does not hold: {'; '.join(refuted)}", min(refuted.values()))
    if undecided := p_values[OPEN]:
        return Judgment(OPEN, ours, f"undecided: {'; '.join(undecided)}", max(undecided.values()))
    confirmed = p_values[CONFIRMED]
    return Judgment(CONFIRMED, ours, f"holds: {'; '.join(confirmed)}", max(confirmed.values()))


def equal_within(differences: Sequence[float], margin: float, diverged: int) -> Judgment:
    """Confirmed if the difference is within ± `margin` (TOST), refuted if its interval lies outside, else open."""
    if diverged or len(differences) < 2:
        return left_open(diverged)
    found, inside = estimate(differences), equivalence_p(differences, margin)
    outside = 2 * min(p_above(differences, margin), p_above([-value for value in differences], margin))
    assert inside is not None
    if inside < ALPHA:
        return Judgment(CONFIRMED, nats(found), f"the difference is within ±{margin:g} (TOST)", inside)
    if outside < ALPHA:
        return Judgment(REFUTED, nats(found), f"the difference is outside ±{margin:g}", outside)
    return Judgment(OPEN, nats(found), f"the interval is neither within nor outside ±{margin:g}", inside)


def p_above(differences: Sequence[float], margin: float) -> float:
    """One-sided p-value of "the mean is at most `margin`". A small one says: worse by more than `margin`."""
    p = noninferiority_p([-value for value in differences], -margin)
    assert p is not None
    return p


def lower(differences: Sequence[float], margin: float, diverged: int) -> Judgment:
    """Confirmed if the differences are below 0, refuted if they are above 0 or shown to be within ± `margin` (TOST)."""
    if diverged or len(differences) < 2:
        return left_open(diverged)
    found, small = estimate(differences), equivalence_p(differences, margin)
    assert found.p is not None and small is not None
    if found.p < ALPHA and found.mean < 0:
        return Judgment(CONFIRMED, nats(found), "the difference is below 0", found.p)
    if found.p < ALPHA:
        return Judgment(REFUTED, nats(found), "the difference is above 0", found.p)
    if small < ALPHA:
        return Judgment(REFUTED, nats(found), f"the difference is within ±{margin:g} (TOST)", small)
    return Judgment(OPEN, nats(found), "the interval contains 0, and differences beyond the margin", found.p)
