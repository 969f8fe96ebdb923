"""The verdict of a study: its effects over seeds, with intervals that the errors of learning rates widen."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.ablation.comparison import Finding
from experiments.ablation.outcome import grouped
from experiments.ablation.rates import NEAR, Optimum
from experiments.statistics import ALPHA, estimate, holm, p_inside, p_outside
from experiments.studies.study import Effect, Measured, Protocol, Study, lowest
from files import read_json, require


@dataclass
class Entry:
    """A study with its results and what follows from them, by scale, the one of the verdict first."""

    study: Study
    content: Mapping[str, Any]
    judged: Mapping[str, tuple[str, float]]  # verdict and p, by scale
    found: Sequence[tuple[str, Effect, Finding]]
    p: float | None = None  # the verdict's, corrected for all trained studies; None if this is not one

    @property
    def verdict(self) -> str:
        """At the first scale, which it names."""
        scale, (verdict, _) = next(iter(self.judged.items()))
        if self.p is not None and self.p >= ALPHA:
            return "undecided"
        return f"{verdict} at {scale}" if verdict.endswith("reproduced") else verdict


def read_entries(studies: Iterable[Study], results: Path) -> list[Entry]:
    """The studies that were measured. Raises ValueError if what was written down before the runs has changed."""
    entries = []
    for study in studies:
        file, judged, found = results / f"{study.name}.json", {}, []
        content = read_json(file, dict) if file.exists() else {}
        for scale, key in product(study.scales, content):
            measured_at, _, rules = key.partition(", ")
            if measured_at == scale:
                same = content[key]["environment"]["protocol"] == study.hash(scale, rules)
                require(same, f"{file}: {key} has another protocol; restore that, or delete the result")
                verdict, p, effects = judge(study, study.scales[scale], content[key]["measured"])
                judged[key] = verdict, p
                found += [(key, *each) for each in effects]
        if judged:
            entries.append(Entry(study, content, judged, found))
    trained = [entry for entry in entries if next(iter(entry.study.protocols.values())).arms]
    corrected = holm([next(iter(entry.judged.values()))[1] for entry in trained])
    for entry, p in zip(trained, corrected, strict=True):
        entry.p = p
    return entries


def judge(study: Study, protocol: Protocol, measured: Measured) -> tuple[str, float, list[tuple[Effect, Finding]]]:
    """The verdict, its p-value before it is corrected for the other studies, and what was found of each effect.

    Reproduced if all intervals lie where they should, not reproduced if one excludes what was expected. Nothing
    is estimated where an arm is not tuned, or a run diverged or is out of range.
    """
    found, outside, inside = [], [], []  # p-values of "outside of `reproduced`" and "inside of `expected`"
    for effect in study.effects:
        if values := values_of(study, effect, measured):
            slack = slack_of(study, effect, protocol, measured)
            known, tuned = math.isfinite(slack), not math.isnan(slack)
            measure = estimate(values, slack) if known else None
            found.append((effect, Finding(measure, len(values), tuned, values)))
            if effect.reproduced and effect.expected:
                outside.append(p_outside(values, effect.reproduced, slack) if known else 1.0)
                inside.append(p_inside(values, effect.expected, slack) if known else 1.0)
    if not outside:
        return "shown", 1.0, found
    if (p := 2 * len(inside) * min(inside)) < ALPHA:
        return "not reproduced", p, found
    if (p := 2 * max(outside)) < ALPHA:
        return "exact" if study.exact else "reproduced", p, found
    return "undecided", 1.0, found


def values_of(study: Study, effect: Effect, measured: Measured) -> list[float]:
    """The effect by seed. Empty if this scale does not have its arms."""
    found, derive = [], study.values.get(effect.value, lowest)
    for rows in grouped((row["seed"], row) for row in measured["runs"]).values():
        values = derive(rows, measured)
        if effect.terms.keys() <= values.keys():
            found.append(sum(factor * values[arm] for arm, factor in effect.terms.items()))
    return found


def slack_of(study: Study, effect: Effect, protocol: Protocol, measured: Measured) -> float:
    """What the errors of learning rates are expected to cost the effect: how much it moves if losses are lower by that.

    NaN if an optimum that matters was not found. Infinite if a run diverged or is out of range.
    """
    before, total = mean(values_of(study, effect, measured)), 0.0
    if not math.isfinite(before):
        return math.inf
    for name, runs in protocol.arms.items():
        tuned = runs.like or name
        if optimum := measured["optima"].get(tuned):
            at_it = [row["value"] for row in measured["runs"] if row["arm"] == tuned]
            known = None not in at_it and Optimum(**optimum).holds(at_it, NEAR)
            regret = optimum["regret"] if known else 0.01
            moved = [
                row | {key: row[key] - regret for key in ("value", "best") if row[key] and row["arm"] == name}
                for row in measured["runs"]
            ]
            change = abs(mean(values_of(study, effect, measured | {"runs": moved})) - before)
            total += math.nan if change and not known else change
    return total
