"""The verdict on a claim: its effects over seeds, with intervals that the errors of learning rates widen."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

import numpy as np

from experiments.claims.claim import Claim, Effect, Measured, Protocol, Row
from experiments.statistics import Estimate, estimate

ALPHA = 0.05
Values = dict[str, float]  # by arm, of one seed


@dataclass(frozen=True)
class Judgment:
    """What was found of each effect, and what follows from those that are judged."""

    verdict: str
    found: Mapping[str, Estimate]  # by effect
    reason: str = ""
    p: float | None = None  # of the verdict, before it is corrected for the other claims


def final(rows: list[Row], measured: Measured) -> Values:
    """The value of each arm with one rate."""
    return {row["arm"]: math.inf if row["value"] is None else row["value"] for row in rows}


def sensitivity(rows: list[Row], measured: Measured) -> Values:
    """How much is lost, on average over an arm's rates, to its best one. More than at the start is not lost."""
    losses = {
        arm: [min(final([row], measured)[arm], measured["initial"]) for row in group] for arm, group in grouped(rows)
    }
    return {arm: mean(group) - min(group) for arm, group in losses.items()}


def best_rate(rows: list[Row], measured: Measured) -> Values:
    """The lowest value over an arm's rates."""
    return {arm: min(final([row], measured)[arm] for row in group) for arm, group in grouped(rows)}


def speed_up(rows: list[Row], measured: Measured) -> Values:
    """ln(steps that pre-norm needs for the loss of nGPT after n steps, over n), by "optimizer n".

    Arms are named "pre muon 250" and "nGPT muon 250". The loss of pre-norm is linear in ln(steps) between its runs, and
    beyond them as in the last piece.
    """
    curves: dict[tuple[str, str], dict[float, float]] = {}
    for arm, loss in final(rows, measured).items():
        placement, optimizer, steps = arm.split()
        curves.setdefault((placement, optimizer), {})[math.log(int(steps))] = loss
    found = {}
    for (placement, optimizer), curve in curves.items():
        points = sorted(curves["pre", optimizer].items())
        for x, loss in curve.items() if placement == "nGPT" else ():
            pieces = list(pairwise(points))
            (x1, y1), (x2, y2) = next((piece for piece in pieces if piece[1][1] <= loss), pieces[-1])
            found[f"{optimizer} {round(math.exp(x))}"] = x1 + (x2 - x1) * (y1 - loss) / (y1 - y2) - x
    return found


def lowest(rows: list[Row], measured: Measured) -> Values:
    """The lowest loss of all evaluations."""
    return {row["arm"]: math.inf if row["best"] is None else row["best"] for row in rows}


def growth(rows: list[Row], measured: Measured) -> Values:
    """ln(what a power law of the variance over depth leaves unexplained, over what an exponential leaves)."""
    found = {}
    for row in rows:
        variances = 2 * np.log(row["residual_rms"][1:])
        depth = np.arange(1, len(variances) + 1)
        power, exponential = (np.polyfit(x, variances, 1, full=True)[1][0] for x in (np.log(depth), depth))
        found[row["arm"]] = float(np.log(power / exponential))
    return found


def grouped(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    arms = dict.fromkeys(row["arm"] for row in rows)
    return [(arm, [row for row in rows if row["arm"] == arm]) for arm in arms]


DERIVED: dict[str, Callable[[list[Row], Measured], Values]] = {
    "value": final,
    "best of all evaluations": lowest,
    "best rate": best_rate,
    "sensitivity": sensitivity,
    "speed-up": speed_up,
    "growth": growth,
}


def values_of(effect: Effect, measured: Measured) -> list[float] | None:
    """The effect by seed, or None if this scale does not have its arms."""
    found = []
    for _, rows in sorted(by_seed(measured).items()):
        values = DERIVED[effect.value](rows, measured)
        if not effect.terms.keys() <= values.keys():
            return None
        found.append(sum(factor * values[arm] for arm, factor in effect.terms.items()))
    return found


def by_seed(measured: Measured) -> dict[int, list[Row]]:
    seeds: dict[int, list[Row]] = {}
    for row in measured["runs"]:
        seeds.setdefault(row["seed"], []).append(row)
    return seeds


def regret_of(effect: Effect, protocol: Protocol, measured: Measured) -> float | None:
    """Nats that the errors of the learning rates are expected to cost the effect. None if an optimum was not found."""
    total = 0.0
    for arm, factor in effect.terms.items():
        tuned = protocol.arms[arm].like or arm if arm in protocol.arms else ""
        if (found := measured.get("optima", {}).get(tuned)) is not None:
            if found["regret"] is None:
                return None
            total += abs(factor) * found["regret"] * math.log(2)
    return total


def judge(claim: Claim, protocol: Protocol, measured: Measured) -> Judgment:
    """Reproduced if all intervals lie where they should, not reproduced if one excludes what was expected."""
    found: dict[str, Estimate] = {}
    chances: list[float] = []  # p-values of "reproduced"
    against: list[float] = []  # and of "not reproduced"
    for effect in claim.effects:
        values = values_of(effect, measured)
        regret = regret_of(effect, protocol, measured)
        if values is None:
            continue
        if not all(map(math.isfinite, values)) or regret is None:
            if effect.judged:
                reason = "a run diverged" if regret is not None else "no optimum was found"
                return Judgment("undecided", found, f"{effect.name}: {reason}")
            continue
        found[effect.name] = estimate(values, regret)
        if effect.judged:
            chances.append(max(one_sided(values, regret, bound, side) for bound, side in sides(effect.reproduced)))
            outside = [1 - one_sided(values, -regret, bound, side) for bound, side in sides(effect.expected)]
            against.append(min(outside, default=1.0))
    if not chances:
        return Judgment("shown", found)
    if min(against) < ALPHA / 2:
        return Judgment("not reproduced at this scale", found, p=2 * min(against))
    if max(chances) < ALPHA / 2:
        return Judgment("reproduced at this scale", found, p=2 * max(chances))
    return Judgment("undecided", found, p=min(1.0, 2 * min(*chances, *against)))


def sides(region: tuple[float, float]) -> list[tuple[float, int]]:
    """The finite bounds of a region, each with the direction in which it lies outside."""
    return [(bound, side) for bound, side in zip(region, (-1, 1), strict=True) if math.isfinite(bound)]


def one_sided(values: list[float], slack: float, bound: float, side: int) -> float:
    """P-value of "the mean lies beyond `bound`", to this side, if learning rates have cost up to `slack`."""
    beyond = estimate([side * (value - bound) + slack for value in values])
    assert beyond.p is not None
    return beyond.p / 2 if beyond.mean < 0 else 1 - beyond.p / 2
