"""The verdicts on studies, by their results, and CLAIMS.md. `page.md` has its prose, and where results go."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from experiments.ablation.outcome import grouped
from experiments.ablation.plots import plot_differences
from experiments.ablation.rates import NEAR, Optimum
from experiments.ablation.report import NONE, Finding, table
from experiments.statistics import ALPHA, estimate, holm, p_inside, p_outside
from experiments.studies.study import Effect, Measured, Protocol, Region, Row, Study, lowest
from files import read_json, require, write_atomically
from pages.html import save_plot

PROSE = Path(__file__).with_name("page.md")
RESULTS = Path("results", "claims")


class Judgement(NamedTuple):
    """What follows from the measurement of a study at a scale."""

    verdict: str
    p: float  # before the correction for the other studies
    effects: list[tuple[Effect, Finding]]


@dataclass
class Entry:
    """A study with its results and judgements, by scale and rules of the corpus, the one of the verdict first."""

    study: Study
    results: Mapping[str, Any]
    judged: Mapping[str, Judgement]
    p: float | None = None  # p of the verdict, corrected for all trained studies; None for others

    @property
    def verdict(self) -> str:
        """At the first scale, which it names."""
        scale, first = next(iter(self.judged.items()))
        if self.p is not None and self.p >= ALPHA:
            return "undecided"
        return f"{first.verdict} at {scale}" if first.verdict.endswith("reproduced") else first.verdict


def read_entries(studies: Iterable[Study], folder: Path) -> list[Entry]:
    """The studies that were measured. Raises ValueError if what was written down before the runs has changed."""
    entries = []
    for study in studies:
        file, judged = folder / f"{study.name}.json", {}
        results = read_json(file, dict) if file.exists() else {}
        for scale, protocol in study.scales.items():
            for key in results:
                measured_at, _, rules = key.partition(", ")
                if measured_at == scale:
                    same = results[key]["environment"]["protocol"] == study.hash(scale, rules)
                    require(same, f"{file}: {key} has another protocol; restore that, or delete the result")
                    judged[key] = judge(study, protocol, results[key]["measured"])
        if judged:
            entries.append(Entry(study, results, judged))
    trained = [entry for entry in entries if next(iter(entry.study.protocols.values())).arms]
    corrected = holm([next(iter(entry.judged.values())).p for entry in trained])
    for entry, p in zip(trained, corrected, strict=True):
        entry.p = p
    return entries


def judge(study: Study, protocol: Protocol, measured: Measured) -> Judgement:
    """Reproduced if all intervals lie where they should, not reproduced if one excludes what was expected.

    Nothing is estimated where an arm is not tuned, or a run diverged or is out of range.
    """
    found, outside, inside = [], [], []  # p-values of "outside of `reproduced`" and "inside of `expected`"
    for effect in study.effects:
        if values := values_of(study, effect, measured, measured["runs"]):
            slack = slack_of(study, effect, protocol, measured)
            known, tuned = math.isfinite(slack), not math.isnan(slack)
            found.append((effect, Finding(estimate(values, slack) if known else None, len(values), tuned, values)))
            if effect.reproduced and effect.expected:
                outside.append(p_outside(values, effect.reproduced, slack) if known else 1.0)
                inside.append(p_inside(values, effect.expected, slack) if known else 1.0)
    if not outside:
        return Judgement("shown", 1.0, found)
    if (p := 2 * len(inside) * min(inside)) < ALPHA:
        return Judgement("not reproduced", p, found)
    if (p := 2 * max(outside)) < ALPHA:
        return Judgement("exact" if study.exact else "reproduced", p, found)
    return Judgement("undecided", 1.0, found)


def values_of(study: Study, effect: Effect, measured: Measured, runs: list[Row]) -> list[float]:
    """The effect by seed. Empty if this scale does not have its arms."""
    found, derive = [], study.values.get(effect.value, lowest)
    for rows in grouped((row["seed"], row) for row in runs).values():
        values = derive(rows, measured)
        if effect.terms.keys() <= values.keys():
            found.append(sum(factor * values[arm] for arm, factor in effect.terms.items()))
    return found


def slack_of(study: Study, effect: Effect, protocol: Protocol, measured: Measured) -> float:
    """What the errors of learning rates are expected to cost the effect: how much it moves if losses fall by that.

    NaN if an optimum that matters was not found. Infinite if a run diverged or is out of range.
    """
    runs, total = measured["runs"], 0.0
    before = mean(values_of(study, effect, measured, runs))
    if not math.isfinite(before):
        return math.inf
    for name, arm in protocol.arms.items():
        tuned = arm.like or name
        if optimum := measured["optima"].get(tuned):
            at_it = [row["value"] for row in runs if row["arm"] == tuned]
            known = None not in at_it and Optimum(**optimum).holds(at_it, NEAR)
            regret = optimum["regret"] if known else 0.01
            moved = [
                row | {key: row[key] - regret for key in ("value", "best") if row[key] and row["arm"] == name}
                for row in runs
            ]
            change = abs(mean(values_of(study, effect, measured, moved)) - before)
            total += math.nan if change and not known else change
    return total


# --- the page --------------------------------------------------------------------------------------------------------


def write_page(entries: list[Entry], out: Path) -> None:
    """Write CLAIMS.md to `out`, and a figure for each study to `out`/results/claims."""
    introduction, *sections = PROSE.read_text("utf-8").split("\n\n## ")
    known = {entry.study.name: entry for entry in entries}
    rows, text = [], []
    for section in sections:
        title, prose = section.split("\n\n", 1)
        prose, _, name = prose.strip().removesuffix(" -->").partition("\n\n<!-- ")
        if entry := known.get(name):
            primary = [
                f"{effect.name}, {scale}: {format_effect(effect, finding)}"
                for scale, each in entry.judged.items()
                for effect, finding in each.effects
                if effect.reproduced
            ]
            published = " ".join(prose.partition("Published:")[2].partition("\n\n")[0].split())
            rows.append([title, f"**{entry.verdict}**", "; ".join(primary), published])
            text += [f"## {title}", prose, details(entry), f"![{name}]({(RESULTS / name).as_posix()}.png)"]
            save_plot(plot(entry), out / RESULTS / f"{name}.png")
    verdicts = table(["claim", "verdict", "primary effect", "published"], rows)
    text = [introduction.replace("<!-- TABLE -->", verdicts), *text]
    write_atomically(out / "CLAIMS.md", "\n\n".join(text) + "\n")


def details(entry: Entry) -> str:
    """Verdict, effects, and how they were measured, in Markdown."""
    p = before = ""
    if entry.p is not None:
        p = f" (p = {entry.p:.3g}, corrected for all trained claims of this page)"
        before = " before the correction"
    verdict, rows, made = [f"**{entry.verdict}**{p}."], [], [f"`python ablate.py claim {entry.study.name}`."]
    for effect in entry.study.effects:
        if effect.reproduced and effect.expected:
            inside, outside = bounds(effect, effect.reproduced), bounds(effect, effect.expected)
            verdict.append(f"{effect.name}: reproduced inside {inside}, not reproduced outside {outside}.")
    for scale, judged in entry.judged.items():
        by = entry.results[scale]["environment"]
        made.append(
            f"{scale}: {judged.verdict}{before}; {by['hours']:.2g} hours, {by['device']}, {by['instruction_set']}, "
            f"commits {', '.join(by['commits'])}, protocol {by['protocol']}."
        )
        for effect, finding in judged.effects:
            least = f"{finding.estimate.detectable:.2g}" if finding.estimate and not effect.ratio else NONE
            rows.append([effect.name, scale, format_effect(effect, finding), least])
    titles = ["effect", "scale", "mean ± 95% interval", "detectable"]
    return "\n\n".join([" ".join(verdict), table(titles, rows), " ".join(made)])


def bounds(effect: Effect, region: Region) -> str:
    low, high = map(math.exp, region) if effect.ratio else region
    return f"[{low:.3g}, {high:.3g}]".replace("inf", "∞")


def format_effect(effect: Effect, finding: Finding) -> str:
    """`+0.0123 ± 0.0045 (n = 12)`, or `0.96 [0.95, 0.98] (n = 10)` for a ratio, or why there is nothing."""
    found = finding.estimate
    if found is None:
        return "a run diverged or is out of range" if finding.tuned else "no best learning rate was found"
    if effect.ratio:
        middle, low, high = map(math.exp, (found.mean, found.low, found.high))
        return f"{middle:#.3g} [{low:#.3g}, {high:#.3g}] (n = {found.n})"
    return f"{found:+.3g} (n = {found.n})"


def plot(entry: Entry) -> Figure:
    """The effects of the same kind as the first, at every scale."""
    first = entry.study.effects[0]
    found = {
        f"{effect.name}, {scale}": finding
        for scale, judged in entry.judged.items()
        for effect, finding in judged.effects
        if (effect.value, effect.ratio) == (first.value, first.ratio) and finding.estimate
    }
    return plot_differences(found, entry.study.unit)
