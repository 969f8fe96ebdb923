"""A report on runs, all of it from their records: tables, sentences, figures, and files for scripts."""

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from experiments.findings import (
    MARGIN,
    NO_VERDICT,
    SEEDS,
    UNDECIDED,
    VERDICTS,
    WIDE,
    Finding,
    Pair,
    Trend,
    baselines_of,
    compare,
    find,
)
from experiments.plots import arm_styles, plot_curves, plot_differences, plot_ladder
from experiments.rates import POINTS, WINDOW, Optimum, find_optimum, losses_of
from experiments.records import SIZE, UNNAMED, Arm, Record, final_bpb, grouped, name_arms, rows_of
from experiments.statistics import ALPHA
from files import write_atomically
from pages.html import figure, folded, markdown, page, save_plot, settings_list
from pages.watch import plot_streams
from runtime.run_dir import Row, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE = "–"
INCOMPLETE = "†"  # beside a statistic that does not rest on all seeds
FEW = 3  # compared arms; the conclusion has no numbers of more
MANY = 6  # more arms that are undecided for one reason are counted in the conclusion, not named
PAIRED_BY = ("data", "tokenizer", "batch_size", "context", "eval_tokens")  # besides the seed
SAME = 0.01  # costs that differ by less are the same
HOW_TO_READ = (
    "A statistic is a mean over n seeds ± the half-width of its 95% interval (Student's t). Differences are paired: as "
    "far as their shapes allow, each seed gives both arms the same initial weights and batches. Below zero is better. "
    "p tests for no difference (paired t test). All p-values of this report are corrected together (Holm); each "
    "interval is for one comparison. `detectable` is about the smallest true difference that so many seeds show in "
    "four of five experiments, with the strictest correction; for two or three seeds it is too small, by up to a "
    "quarter. These statistics are about chance in seeds, not about other texts.",
    f"An arm is {VERDICTS[2]} if its whole interval lies between -{MARGIN} and {MARGIN}. Otherwise it is better or "
    f"worse if p is below {ALPHA} with at least {SEEDS} seeds: two show a true difference so seldom that most of what "
    "they seem to show is chance. Else it is undecided, which does not mean equal. At a learning rate that was not "
    "searched for, an arm is only better at this rate: arms that are equal at their best rates often differ at one.",
    f"{INCOMPLETE} Some seeds are missing, because a run diverged (its loss was not finite, or ended above that of a "
    "uniform prediction) or has not ended. The others may be the easy ones, so their mean has no p.",
)
SEARCH = (
    f"val_bpb on seeds that are not reported. An arm is reported at the vertex of a parabola through the losses within "
    f"{WINDOW:.3f} bits per byte (0.1 nats) of the lowest, of at least {POINTS} rates. The regret is what an error of "
    "the vertex is expected to cost: intervals are wider by it, and p-values count only what is beyond. No optimum is "
    f"found if fewer than {POINTS} rates are that close, if the vertex is not among them, or if the {POINTS} rates "
    "nearest to it have another. The arm is then reported at its best rate and has no p-value. The same holds if its "
    "reported seeds end, on average, further than that from the parabola."
)
LADDER = (
    "The slope is that of a line through an arm's differences, for each doubling of the first arm's FLOPs. Each seed "
    f"has its own line. A trend is shown if p is below {ALPHA} with at least {SEEDS} seeds. A size whose interval is "
    f"more than {WIDE} times as wide as the best (*) does not count."
)


# --- what is found ---------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """What is found of all arms."""

    arms: dict[Arm, list[Record]]  # their reported runs
    search: dict[Arm, list[Record]]  # the runs that looked for learning rates
    optima: dict[Arm, Optimum]  # empty while the search goes on
    baselines: dict[Arm, Arm]  # what each arm is compared with: the first one with its size and text
    pairs: dict[Pair, Finding]
    trends: dict[Arm, Trend]  # in a ladder
    tests: int  # that are corrected together
    others: list[str]  # options in which arms differ, besides those in their names

    @property
    def found(self) -> dict[Arm, Finding]:
        """The difference of each arm from its baseline."""
        return {arm: each for (arm, other), each in self.pairs.items() if other == self.baselines[arm]}

    @property
    def against(self) -> str:
        """What arms are compared with."""
        first = next(iter(self.arms))
        if len(set(self.baselines.values())) == 1:
            return first.name
        sizes = {arm.size for arm in self.arms}
        return f"{first.without_size.name} of the same size" if len(sizes) > 1 else "the first arm with the same text"

    @property
    def ordered(self) -> list[Arm]:
        """Each baseline, and the arms that are compared with it, by their difference. A ladder stays as it is."""
        if next(iter(self.arms)).size:
            return [*self.arms]
        means = {arm: each.estimate.mean for arm, each in self.found.items() if each.estimate}
        first = [*dict.fromkeys(self.baselines.values())]

        def position(arm: Arm) -> tuple[int, bool, float]:
            return first.index(self.baselines[arm]), arm not in first, means.get(arm, math.inf)

        return sorted(self.arms, key=position)


def compare_records(records: list[Record]) -> Comparison:
    named, others = name_arms(records)
    arms = grouped((each.arm, each) for each in named if not each.search)
    search = grouped((each.arm, each) for each in named if each.search)
    optima = {arm: find_optimum(losses_of(runs)) for arm, runs in search.items() if arms and losses_of(runs)}
    bpb = {arm: final_bpb(runs) for arm, runs in arms.items()}
    regrets = {arm: each.regret if each.holds(bpb.get(arm, {}).values()) else None for arm, each in optima.items()}
    flops = {arm: runs[0].flops for arm, runs in arms.items() if arm.size and runs[0].flops}
    planned = {arm: [run.seed for run in runs] for arm, runs in arms.items()}
    texts = {arm: text_of(runs[0]) for arm, runs in arms.items()}
    pairs, trends, tests = compare(bpb, planned, regrets, flops, texts) if bpb else ({}, {}, 0)
    return Comparison(arms, search, optima, baselines_of([*arms], texts), pairs, trends, tests, others)


def text_of(record: Record) -> tuple[str, ...]:
    """What runs must share besides the seed to be paired. Where that is not known, the folder."""
    return tuple(record.settings.get(name, UNNAMED[name]) for name in PAIRED_BY) if record.known else (record.folder,)


# --- sentences -------------------------------------------------------------------------------------------------------


def summary_of(found: Comparison) -> list[str]:
    """What is shown, under which conditions, and at which costs: a line each."""
    if not found.arms:
        return [""]
    return [verdicts(found), conditions(found), resolution(found)]


def verdicts(found: Comparison) -> str:
    lrs = {run.lr for runs in found.arms.values() for run in runs}
    rates = "each at its own best learning rate"
    if not found.optima:
        rates = "at learning rates that differ and were not tuned"
        rates = f"at learning rate {lrs.pop():g}, which was not tuned" if len(lrs) == 1 else rates
    parts = []
    if found.trends:
        groups = grouped((slope.verdict, arm.name) for arm, slope in found.trends.items())
        said = [f"{trend} for {listed(arms)}" + (f", as {why}" if why else "") for (trend, why), arms in groups.items()]
        parts.append(f"With compute, {'; '.join(said)}.")
    if found.found:
        parts.append(f"Compared with {found.against}, {rates}: {by_verdict(found.found)}.")
    if len(found.arms) == 1:
        ((arm, runs),) = found.arms.items()
        parts.append(f"One arm, {arm.name}: val_bpb {mean_of(runs)}.")
    elif alone := [arm.name for arm, other in found.baselines.items() if [*found.baselines.values()].count(other) == 1]:
        parts.append(f"Not compared, as no other arm has the same text and batches: {listed(alone)}.")
    return " ".join(parts)


def by_verdict(found: Mapping[Arm, Finding]) -> str:
    """`a and b are better; c is undecided`, with numbers if these are few. Many undecided arms are only counted.

    In a ladder: `a (dim=32, dim=64) is better`.
    """
    few, parts = len(found) <= FEW, []
    groups = grouped(((each.words, each.verdict), arm) for arm, each in found.items())
    order = [*VERDICTS, NO_VERDICT]
    for words, (verdict, reason) in sorted(groups, key=lambda key: order.index(key[1][0])):
        arms = groups[words, (verdict, reason)]
        names = [f"{arm.name}{numbers(found[arm]) if few else ''}" for arm in arms]
        if arms[0].size and not few:
            at = grouped((arm.without_size.name, arm.width) for arm in arms)
            names = [f"{name} ({', '.join(widths)})" for name, widths in at.items()]
        are = f"{listed(names)} {'are' if len(names) > 1 else 'is'}"
        if verdict in (UNDECIDED, NO_VERDICT) and len(arms) > MANY:
            are = f"{len(arms)} of {len(found)} {'comparisons' if arms[0].size else 'arms'} are"
        if verdict == NO_VERDICT:
            differences = ", ".join(f"{arm.name} {signed(found[arm])}" for arm in arms[:MANY])
            parts.append(f"one seed, so no verdict: {differences}")
        else:
            parts.append(f"{are} {words}" + (f", as {reason}" if reason else ""))
    return "; ".join(parts)


def conditions(found: Comparison) -> str:
    """`n = 3; 0.2M parameters, 0.5M tokens of python, bfloat16; equal tokens.`"""
    runs = [run for each in found.arms.values() for run in each]
    counts = sorted({each.estimate.n for each in found.found.values() if each.estimate})
    parts = [f"n = {' or '.join(map(str, counts))}"] if counts else []
    known = all(run.known for run in runs)
    texts = sorted({run.settings["data"].partition("@")[0] for run in runs}) if known else []
    dtypes = sorted({run.settings["dtype"] for run in runs}) if known else []
    if sizes := [run.parameters for run in runs if run.parameters]:
        tokens = " of ".join([f"{span([run.tokens or 0 for run in runs])} tokens", *filter(None, [listed(texts)])])
        parts += [", ".join([f"{span(sizes)} parameters", tokens, *dtypes]), equal_in(found)]
    if found.others:
        parts.append(f"arms also differ in {listed([name.replace('_', ' ') for name in found.others])}")
    return "; ".join(parts) + "." if parts else ""


def span(values: Sequence[float]) -> str:
    """`0.2M`, or `0.2M to 0.8M`."""
    ends = dict.fromkeys(f"{value / 1e6:.2g}M" for value in (min(values), max(values)))
    return " to ".join(ends)


COSTS: dict[str, Callable[[Record], float]] = {  # of a run
    "tokens": lambda run: run.tokens or math.nan,
    "FLOPs": lambda run: run.flops or math.nan,
    "time": lambda run: (run.tokens or math.nan) * (run.step_time or math.nan),
}


def relative_costs(found: Comparison, cost: Callable[[Record], float]) -> dict[Arm, float]:
    """The cost of a run of each arm over that of what it is compared with. NaN if it is not known."""
    return {arm: cost(runs[0]) / cost(found.arms[found.baselines[arm]][0]) for arm, runs in found.arms.items()}


def equal_in(found: Comparison) -> str:
    """The cost that is the same for all arms of a size."""
    relative = {name: relative_costs(found, cost).values() for name, cost in COSTS.items()}
    equal = (name for name, values in relative.items() if all(abs(each - 1) <= SAME for each in values))
    return f"equal {name}" if (name := next(equal, "")) else "at different costs"


def resolution(found: Comparison) -> str:
    """What could have been seen, and what a step costs."""
    parts = []
    if detectable := [each.detectable for each in found.found.values() if each.detectable]:
        several = ", the median of all arms" if len(detectable) > 1 else ""
        parts.append(f"Four of five repetitions would show a true difference of {median(detectable):.3f}{several}")
    if changes := [each.detectable * each.doublings for each in found.trends.values() if each.detectable]:
        parts.append(f"the whole ladder would show a change of {median(changes):.3f}")
    of_a_step: dict[str, Callable[[Record], float]] = {
        "as long": lambda run: run.step_time or math.nan,
        "the FLOPs": lambda run: (run.flops or math.nan) / (run.tokens or math.nan),
    }
    for what, cost in of_a_step.items():
        other = {arm.name: ratio for arm, ratio in relative_costs(found, cost).items() if abs(ratio - 1) > SAME}
        if len(other) > FEW:
            parts.append(f"steps take {min(other.values()):.2f} to {max(other.values()):.2f} times {what}")
        else:
            parts += [f"a step of {name} takes {ratio:.2f} times {what}" for name, ratio in other.items()]
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def numbers(finding: Finding) -> str:
    """` (−0.040 ± 0.033, p = 0.035)`, or nothing if some seeds are missing."""
    p = "" if finding.p is None else f", p = {digits_of(finding.p)}"
    return f" ({signed(finding)}{p})" if finding.complete and len(finding.values) > 1 else ""


def signed(finding: Finding) -> str:
    return f"{finding.estimate:+.3f}".replace("-", "−")


def digits_of(p: float) -> str:
    """Two digits of a p-value, or as many as show on which side of `ALPHA` it is."""
    rounded = (f"{p:.{digits}g}" for digits in range(2, 18))
    return next(text for text in rounded if (float(text) < ALPHA) == (p < ALPHA))


# --- tables ----------------------------------------------------------------------------------------------------------


def statistic(finding: Finding, spec: str = "+.4f") -> str:
    """`1.7642 ± 0.0031 (3)`, or `1.7642 ± 0.0031 (2 of 3)†` if it does not rest on all seeds; a dash for none."""
    if finding.estimate is None:
        return NONE
    n = finding.estimate.n
    return f"{finding.estimate:{spec}} " + (f"({n})" if finding.complete else f"({n} of {finding.planned}){INCOMPLETE}")


def mean_of(runs: Sequence[Record]) -> str:
    return statistic(find([*final_bpb(runs).values()], len(runs)), ".4f")


def columns_of(finding: Finding) -> list[str]:
    """A difference, the verdict, p, and what is detectable."""
    detectable = NONE if finding.detectable is None else f"{finding.detectable:.4f}"
    p = NONE if finding.p is None else digits_of(finding.p) if finding.p >= 1e-4 else "< 0.0001"
    return [statistic(finding), finding.words, p, detectable]


def comparison_table(found: Comparison) -> str:
    """A row for each arm: the difference and the verdict first, then what they rest on."""
    names = [name.replace("_", " ") for name, _ in next(iter(found.arms)).factors]
    titles = [*names, f"difference from {found.against} (n)", "verdict", "p", "detectable"]
    titles += ["val_bpb (n)", "lr", "diverged"]
    rows = []
    for arm in found.ordered:
        runs = found.arms[arm]
        columns = columns_of(found.found[arm]) if arm in found.found else [NONE] * 4
        diverged = f"{sum(run.diverged for run in runs)} of {sum(run.ended for run in runs)}"
        rows.append([*dict(arm.factors).values(), *columns, mean_of(runs), f"{runs[0].lr:g}", diverged])
    return table(titles, rows)


def ladder_table(found: Comparison) -> str:
    sizes = {arm.size: f"{runs[0].flops:.2g} FLOPs" for arm, runs in reversed(found.arms.items())}
    rows = []
    for arm, slope in found.trends.items():
        known = [f"{statistic(slope.rungs[size])}{'*' * (size in slope.left_out)}" for size in slope.rungs]
        rows.append([arm.name, *known, *columns_of(slope)])
    titles = [sizes[size] for size in next(iter(found.trends.values())).rungs]
    return table(["arm", *titles, "slope for each doubling (n)", "trend", "p", "detectable"], rows)


def factor_table(found: Comparison) -> str:
    """Arms that differ in one factor, such as post − pre within AdamW."""
    rows = []
    for (arm, other), finding in found.pairs.items():
        shared = tuple(factor for factor in arm.factors if factor in other.factors)
        if len(shared) == len(arm.factors) - 1:
            one, zero = (Arm(tuple({*each.factors} - {*shared})).name for each in (arm, other))
            rows.append([f"{one} − {zero}", Arm(shared).name, *columns_of(finding)])
    return table(["difference", "within", "difference (n)", "verdict", "p", "detectable"], rows)


def search_table(found: Comparison) -> str:
    """A row for each arm and a column for each learning rate."""
    lrs = sorted({run.lr for runs in found.search.values() for run in runs})
    rows = []
    for arm, runs in found.search.items():
        row = [arm.name]
        for lr in lrs:
            tried = [run for run in runs if run.lr == lr]
            diverged = any(run.diverged for run in tried) and not final_bpb(tried)
            row.append("diverged" if diverged else mean_of(tried))
        best = regret = NONE
        if arm in found.optima:
            best = f"{found.optima[arm].lr:g}"
            regret = "optimum not found" if found.optima[arm].regret is None else f"{found.optima[arm].regret:.4f}"
        rows.append([*row, best, regret])
    return table(["arm", *(f"{lr:g}" for lr in lrs), "reported at", "regret"], rows)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(line)} |" for line in (titles, *rows))
    return "\n".join([first, "|---" * len(titles) + "|", *others])


# --- files -----------------------------------------------------------------------------------------------------------


def write_report(folder: Path, records: list[Record], command: str = "", notes: Collection[str] = ()) -> list[str]:
    """Write `runs.csv`, `arms.csv`, `report.json`, `table.md`, `report.html` and the figures. Returns the summary.

    Figures that only an earlier report had are deleted. `notes` are said beside the command.
    """
    found, records = compare_records(records), name_arms(records)[0]
    ended = sum(run.ended for run in records)
    summary = summary_of(found)
    if not found.arms:
        summary = [f"**Partial: the search for learning rates has not ended; {ended} of its runs have.**"]
    elif ended < len(records):
        summary[0] = f"**Partial: {ended} of {len(records)} runs have ended.** {summary[0]}"
    arms = arm_rows(found)
    for name, rows in (("runs", rows_of(records)), ("arms", arms)):
        file = io.StringIO()
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(folder / f"{name}.csv", file.getvalue())
    write_atomically(folder / "report.json", json.dumps(for_scripts(found, summary, arms), indent=2) + "\n")
    machines = sorted({run.machine for run in records if run.machine})
    about = [f"`{command}`" if command else "", "; ".join([seeds_of(found), *machines]), *notes, *HOW_TO_READ]
    sections = []
    if found.arms:
        sections += ["## Comparison", comparison_table(found)]
    if found.trends:
        sections += ["## Effect over compute", LADDER, ladder_table(found)]
    if len(found.pairs) > len(found.found):
        sections += ["## One factor at a time", factor_table(found)]
    if found.search:
        sections += ["## Learning rates", SEARCH, search_table(found)]
    text = "\n\n".join(filter(None, [*summary, *sections, *about]))
    write_atomically(folder / "table.md", text + "\n")
    parts, figures = [markdown("\n\n".join([*summary, *sections]))], figures_of(found)
    for name in ("ladder", "differences", "curves", "watch"):
        for kind in ("png", "svg", "pdf"):
            if name in figures:
                save_plot(figures[name], folder / f"{name}.{kind}")
            else:
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
    parts += [figure(plot, alt=f"{name} of the arms") for name, plot in figures.items()]
    parts += [folded("How to read this", markdown("\n\n".join(filter(None, about))))]
    parts += [folded("Settings of the first arm", settings_list(records[0].options))]
    write_atomically(folder / "report.html", page(title_of(found), parts))
    return summary


def arm_rows(found: Comparison) -> list[Row]:
    """The rows of arms.csv."""
    rows = []
    for arm in found.ordered if found.arms else ():
        runs = found.arms[arm]
        mean = find([*final_bpb(runs).values()], len(runs))
        row = {"arm": arm.name, **dict(arm.factors), "lr": runs[0].lr, "seeds": mean.planned, "n": len(mean.values)}
        row |= {"val_bpb": mean.row.get("difference"), "val_bpb_half_width": mean.row.get("half_width")}
        row |= {"diverged": sum(run.diverged for run in runs), "dtype": runs[0].settings.get("dtype")}
        row |= {name: getattr(runs[0], name) for name in ("parameters", "tokens", "flops", "step_time")}
        if arm in found.optima:
            regret = found.optima[arm].regret
            row |= {"regret": regret, "optimum_found": regret is not None}
        rows.append(row | (found.found[arm].row if arm in found.found else {}))
    return rows


def for_scripts(found: Comparison, summary: list[str], arms: list[Row]) -> Row:
    """What report.json contains."""
    runs = [run for each in found.arms.values() for run in each]
    pairs = [{"arm": arm.name, "baseline": other.name, **each.row} for (arm, other), each in found.pairs.items()]
    sizes = {"flops": flops_of(found)}
    slopes = [{"arm": arm.name, **each.row, **sizes, "left_out": each.left_out} for arm, each in found.trends.items()]
    return {
        "summary": summary[0],
        "conditions": summary[1] if len(summary) > 1 else "",
        "resolution": summary[2] if len(summary) > 2 else "",
        "arms": arms,
        "comparisons": pairs,
        "slopes": slopes,
        "tests": found.tests,
        "correction": "Holm",
        "alpha": ALPHA,
        "margin": MARGIN,
        "tuned": bool(found.optima),
        "data": sorted({run.settings.get("data", "") for run in runs}),
        "tokenizer": sorted({run.settings.get("tokenizer", "") for run in runs}),
        "dtype": sorted({run.settings.get("dtype", "") for run in runs}),
        "commits": sorted({run.commit for run in runs}),
        "machines": sorted({run.machine for run in runs}),
    }


def flops_of(found: Comparison) -> dict[str, float | None]:
    """FLOPs of a run of the first arm of each size."""
    return {arm.size: runs[0].flops for arm, runs in reversed(found.arms.items())}


def seeds_of(found: Comparison) -> str:
    seeds = sorted({run.seed for runs in found.arms.values() for run in runs})
    return f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}" if seeds else "no seeds yet"


def title_of(found: Comparison) -> str:
    """`norm: rmsnorm, layernorm; placement: pre`."""
    factors = chain.from_iterable(arm.factors for arm in found.arms or found.search)
    levels = grouped(dict.fromkeys((name, value.split(",")[0] if name == SIZE else value) for name, value in factors))
    return "; ".join(f"{name.replace('_', ' ')}: {', '.join(values)}" for name, values in levels.items())


def figures_of(found: Comparison) -> dict[str, "Figure"]:
    """The plots of a report, by the names of their files."""
    figures: dict[str, Figure] = {}
    styles = arm_styles(found.arms)
    seeds = seeds_of(found)
    if any(each.values for each in found.found.values()):
        title = f"Difference from {found.against}, {seeds}"
        if found.trends:
            figures["ladder"] = plot_ladder(found.found, flops_of(found), title)
        named = {arm.name: found.found[arm] for arm in found.ordered if arm in found.found}
        figures["differences"] = plot_differences(named, title, styles)
    ended = [run for arm in found.ordered for run in found.arms[arm] if run.ended and run.log] if found.arms else []
    if ended:
        figures["curves"] = plot_curves(ended, styles, f"Means of {seeds}")
    logs = {run.arm.name: read_rows(run.path / "watch.jsonl") for run in ended}  # of each arm's last seed
    if watched := {name: log for name, log in logs.items() if log}:
        figures["watch"] = plot_streams(watched, styles)
    return figures
