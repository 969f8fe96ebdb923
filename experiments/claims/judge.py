"""The verdict on a claim: each comparison is tested over seeds, all are corrected with Holm's method."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import mul

from experiments.claims.claim import OPEN, Claim, Comparison, Judgment
from experiments.claims.measure import Measured, Protocol, Variants
from experiments.statistics import equivalence_p, estimate, fisher_p, holm

ALPHA = 0.05
CLEARLY = 0.1  # nats below the unigram loss: runs that learn only the frequencies of the tokens end within 0.02 of it
STABLE = 0.1  # nats above the best rate of the arm and seed

Rows = list[Measured]


def learned(row: Measured, measured: Measured) -> bool:
    """Whether a run did not diverge and learned clearly more than the frequencies of the tokens."""
    return not row["diverged"] and row["val_loss"] < measured["unigram"] - CLEARLY


def failed(rows: Rows, measured: Measured) -> float:
    return float(not all(learned(row, measured) for row in rows))


def log_lr_range(rows: Rows, measured: Measured) -> float:
    """Logarithm of the largest over the smallest stable learning rate; 0 if all runs diverged."""
    done = [row for row in rows if not row["diverged"]]
    best = min((row["val_loss"] for row in done), default=math.inf)
    stable = [row["lr"] for row in done if row["val_loss"] < best + STABLE]
    return math.log(max(stable) / min(stable)) if stable else 0.0


# Values that are not a column of the runs, from all runs of an arm with one seed. They count runs that diverge.
DERIVED: dict[str, Callable[[Rows, Measured], float]] = {"failed": failed, "log_lr_range": log_lr_range}


@dataclass(frozen=True)
class Finding:
    """What came out of a comparison."""

    comparison: Comparison
    values: list[float]  # by seed
    figure: str
    holds: bool  # what the values say, if p is small
    p: float


def judge(claim: Claim, protocol: Protocol, measured: Measured) -> Judgment:
    """Confirmed if every comparison comes out as expected, refuted if one does not, else inconclusive."""
    averaged = any(each.value not in DERIVED for each in claim.comparisons)
    diverged = sum(row.get("diverged", False) for row in measured["runs"])
    if averaged and diverged:  # the mean of the other runs would be too good
        return Judgment(OPEN, "–", f"{diverged} of the reported runs diverged")
    found = find(claim, protocol, measured)
    ours = "; ".join(f"{each.comparison.name}: {each.figure}" for each in found)
    for name in claim.must_learn:
        rows = rows_of(measured, protocol.arms[name])
        if sum(not learned(row, measured) for row in rows) > len(rows) / 2:
            return Judgment(OPEN, ours, f"most runs of {name} learn nothing")
    judged = [each for each in found if each.comparison.expected != "anything"]
    p_values = holm([each.p for each in judged])
    corrected = {each.comparison.statement: p for each, p in zip(judged, p_values, strict=True) if p is not None}
    opposite = [each.comparison.statement for each in judged if not each.holds]
    wrong = {name: p for name, p in corrected.items() if p < ALPHA and name in opposite}
    undecided = {name: p for name, p in corrected.items() if p >= ALPHA}
    if wrong:
        return Judgment("refuted", ours, f"does not hold: {'; '.join(wrong)}", min(wrong.values()))
    if undecided:
        return Judgment(OPEN, ours, f"undecided: {'; '.join(undecided)}", max(undecided.values()))
    return Judgment("confirmed", ours, "as expected", max(corrected.values()))


def find(claim: Claim, protocol: Protocol, measured: Measured) -> list[Finding]:
    """What came out of each comparison for which at least two seeds did not diverge."""
    found = []
    for each in claim.comparisons:
        arms = [by_seed(measured, protocol.arms[name], each.value) for name in each.terms]
        seeds = sorted(set.intersection(*map(set, arms)))
        rows = [[arm[seed] for arm in arms] for seed in seeds]
        values = [sum(map(mul, each.terms.values(), row)) for row in rows]
        if each.value == "failed":
            found.append(count_failures(each, values, rows))
        elif len(values) > 1:
            found.append(t_test(each, values))
    return found


def by_seed(measured: Measured, variants: Variants, value: str) -> dict[int, float]:
    rows = rows_of(measured, variants)
    if value not in DERIVED:
        return {row["seed"]: row[value] for row in rows if not row.get("diverged")}
    return {
        seed: DERIVED[value]([row for row in rows if row["seed"] == seed], measured)
        for seed in {row["seed"] for row in rows}
    }


def rows_of(measured: Measured, variants: Variants) -> Rows:
    return [row for row in measured["runs"] if row["arm"] in variants]


def t_test(comparison: Comparison, values: list[float]) -> Finding:
    """By two-sided t tests against the bound, and two one-sided tests (TOST) of what is within it."""
    found, bound = estimate(values), comparison.bound
    if comparison.expected == "within":
        holds = abs(found.mean) <= bound
        nearest = math.copysign(bound, found.mean)
        p = equivalence_p(values, bound) if holds else estimate([value - nearest for value in values]).p
    else:
        beyond = [value - bound for value in values]
        holds, p = (found.mean > bound) == (comparison.expected == "above"), estimate(beyond).p
        small = equivalence_p(beyond, comparison.negligible)
        if comparison.negligible and p is not None and small is not None and small < ALPHA <= p:
            holds, p = False, small
    assert p is not None  # of at least two values
    if comparison.value.startswith("log_"):
        middle, low, high = (math.exp(value) for value in (found.mean, found.low, found.high))
        figure = f"{middle:.3g} [{low:.3g}, {high:.3g}]"
    else:
        figure = f"{found:+.4f}{' nats' if 'loss' in comparison.value else ''}"
    return Finding(comparison, values, f"{figure} (n = {found.n})", holds, p)


def count_failures(comparison: Comparison, values: list[float], pairs: list[list[float]]) -> Finding:
    """By Fisher's exact test. `pairs` has the failures of two arms by seed, each 0 or 1."""
    ours, theirs = (round(sum(column)) for column in zip(*pairs, strict=True))
    n, holds = len(pairs), (ours > theirs) == (comparison.expected == "above")
    return Finding(comparison, values, f"{ours} and {theirs} of {n}", holds, fisher_p(ours, n, theirs, n))
