"""The verdict on a claim: its effects over seeds, with intervals that the errors of learning rates widen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from experiments.ablation.outcome import grouped
from experiments.ablation.rates import Optimum
from experiments.claims.claim import Claim, Effect, Measured, Protocol, Row
from experiments.statistics import Estimate, estimate, one_sided_p

ALPHA = 0.05
NEAR = 0.1  # nats: further from its parabola, an arm at its optimum was a matter of luck
REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided"
UNKNOWN, NOT_FINITE = "no best learning rate was found", "a run diverged or is out of range"
Values = dict[str, float]  # by arm, of one seed
Found = Estimate | str  # what was found of an effect, or why nothing was


@dataclass(frozen=True)
class Judgment:
    """What was found of the effects at a scale, and what follows from those that are judged."""

    verdict: str
    found: list[tuple[Effect, Found]]
    p: float = 1.0  # of a verdict that is not "undecided", before it is corrected for the other claims


@dataclass
class Entry:
    """A claim with its results and what follows from them, by scale, the one of the verdict first."""

    claim: Claim
    content: Mapping[str, Any]
    judgments: Mapping[str, Judgment]
    p: float | None = None  # of the verdict, corrected for all trained claims; None if this is not one

    @property
    def verdict(self) -> str:
        """At the first scale, which it names."""
        scale, first = next(iter(self.judgments.items()))
        found = first.verdict if self.p is None or self.p < ALPHA else UNDECIDED
        return f"{found} at {scale}" if found in (REPRODUCED, NOT_REPRODUCED) else found


# --- the values of arms ----------------------------------------------------------------------------------------------


def losses(rows: list[Row], name: str = "value") -> dict[str, list[float]]:
    """By arm, at each of its rates. They are infinite for runs that diverged."""
    return grouped((row["arm"], math.inf if row[name] is None else row[name]) for row in rows)


def sensitivity(rows: list[Row], measured: Measured) -> Values:
    """How much is lost, on average over an arm's rates, to its best one. More than at the start is not lost."""
    capped = {arm: [min(loss, measured["initial"]) for loss in group] for arm, group in losses(rows).items()}
    return {arm: mean(group) - min(group) for arm, group in capped.items()}


def speed_up(rows: list[Row], measured: Measured) -> Values:
    """ln(steps that pre-norm needs for the loss of nGPT after n steps, over n), by "optimizer n".

    Arms are named "pre muon 250" and "nGPT muon 250". The loss of pre-norm is linear in ln(steps) between its runs.
    Outside of them, the result is infinite.
    """
    ended, found = losses(rows), {}
    for arm, (loss,) in ended.items():
        placement, optimizer, steps = arm.split()
        if placement == "nGPT":
            pre = [other.split() for other in ended if other.startswith(f"pre {optimizer}")]
            known, needed = np.transpose(sorted((ended[" ".join(name)][0], math.log(int(name[2]))) for name in pre))
            at_loss = np.interp(loss, known, needed, left=math.inf, right=math.inf)
            found[f"{optimizer} {steps}"] = float(at_loss) - math.log(int(steps))
    return found


def growth(rows: list[Row], measured: Measured) -> Values:
    """ln(what a power law of the variance over depth leaves unexplained, over what an exponential leaves)."""
    found = {}
    for row in rows:
        found[row["arm"]] = math.inf
        if row["residual_rms"]:  # it did not diverge
            variances = 2 * np.log(row["residual_rms"][1:])
            depth = np.arange(1, len(variances) + 1)
            power, exponential = (np.polyfit(x, variances, 1, full=True)[1][0] for x in (np.log(depth), depth))
            found[row["arm"]] = float(np.log(power / exponential))
    return found


DERIVED = {
    "value": lambda rows, measured: {arm: min(group) for arm, group in losses(rows).items()},
    "best evaluation": lambda rows, measured: {arm: min(group) for arm, group in losses(rows, "best").items()},
    "sensitivity": sensitivity,
    "speed-up": speed_up,
    "growth": growth,
}


# --- effects and verdict ---------------------------------------------------------------------------------------------


def values_of(effect: Effect, measured: Measured) -> list[float]:
    """The effect by seed. Empty if this scale does not have its arms."""
    found = []
    for rows in grouped((row["seed"], row) for row in measured["runs"]).values():
        values = DERIVED[effect.value](rows, measured)
        if effect.terms.keys() <= values.keys():
            found.append(sum(factor * values[arm] for arm, factor in effect.terms.items()))
    return found


def slack_of(effect: Effect, protocol: Protocol, measured: Measured) -> float:
    """What the errors of learning rates are expected to cost the effect: how much it moves if losses are lower by that.

    NaN if an optimum that matters was not found. Infinite if a run diverged or is out of range.
    """
    before = mean(values_of(effect, measured))
    if not math.isfinite(before):
        return math.inf
    total = 0.0
    for name, arm in protocol.arms.items():
        tuned = arm.like or name
        if optimum := measured.get("optima", {}).get(tuned):
            at_it = [row["value"] for row in measured["runs"] if row["arm"] == tuned]
            known = None not in at_it and Optimum(**optimum).holds(at_it, NEAR)
            regret = optimum["regret"] if known else 0.01
            moved = [
                row | {key: row[key] - regret for key in ("value", "best") if row[key] and row["arm"] == name}
                for row in measured["runs"]
            ]
            change = abs(mean(values_of(effect, measured | {"runs": moved})) - before)
            total += math.nan if change and not known else change
    return total


def judge(claim: Claim, protocol: Protocol, measured: Measured) -> Judgment:
    """Reproduced if all intervals lie where they should, not reproduced if one excludes what was expected."""
    found: list[tuple[Effect, Found]] = []
    inside, outside = [], []  # p-values of the judged effects
    for effect in claim.effects:
        if values := values_of(effect, measured):
            slack = slack_of(effect, protocol, measured)
            known = math.isfinite(slack)
            reason = UNKNOWN if math.isnan(slack) else NOT_FINITE
            found.append((effect, estimate(values, slack) if known else reason))
            if effect.judged:
                inside.append(max(p_values(values, effect.reproduced, slack, 1)) if known else 1.0)
                outside.append(min(p_values(values, effect.expected, slack, -1)) if known else 1.0)
    if not inside:
        return Judgment("shown", found)
    if (p := 2 * len(outside) * min(outside)) < ALPHA:
        return Judgment(NOT_REPRODUCED, found, p)
    if (p := 2 * max(inside)) < ALPHA:
        return Judgment("exact" if claim.exact else REPRODUCED, found, p)
    return Judgment(UNDECIDED, found)


def p_values(values: list[float], region: tuple[float, float], slack: float, way: int) -> list[float]:
    """For each finite bound of a region: of "the mean lies outside of it" if `way` is 1, on its inner side if -1.

    Learning rates may have cost up to `slack`.
    """
    sides = zip(region, (-way, way), strict=True)
    return [one_sided_p(values, bound - side * slack, side) for bound, side in sides if math.isfinite(bound)]
