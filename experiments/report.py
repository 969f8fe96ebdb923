"""A report on runs, all of it from their records: tables, sentences, figures, and files for scripts."""

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from experiments.costs import PRECISE
from experiments.findings import (
    AS_GOOD,
    AT_A_RATE,
    MARGIN,
    NO_VERDICT,
    SEEDS,
    UNDECIDED,
    VERDICTS,
    WIDE,
    Comparison,
    Finding,
    compare,
    find,
)
from experiments.plots import arm_styles, plot_curves, plot_differences, plot_ladder
from experiments.rates import POINTS, WINDOW
from experiments.records import COSTS, Arm, Record, final_bpb, grouped, name_arms, rows_of
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
TITLE = 12  # arms
MANY = 6  # more arms that are undecided for one reason are counted in the conclusion, not named
HOW_TO_READ = (
    "A statistic is a mean over n seeds ± the half-width of its 95% interval (Student's t). Differences are paired: as "
    "far as their shapes allow, each seed gives both arms the same initial weights and batches. Below zero is better. "
    "p tests for no difference (paired t test), corrected for all tests of this report (Holm); an interval is for one. "
    "`detectable` is about the smallest true difference that so many seeds show in four of five experiments, with the "
    "strictest correction; for three seeds it is too small, by up to a quarter. All this is about chance in "
    "seeds, not about other texts.",
    f"An arm is {AS_GOOD} if its whole interval lies between -{MARGIN} and {MARGIN}. Otherwise it is better or worse "
    f"if p is below {ALPHA} with at least {SEEDS} seeds: what two seem to show is mostly chance. Else it is undecided, "
    "which does not mean equal. At a learning rate that was not searched for, an arm is only better at this rate: arms "
    "that are equal at their best rates often differ at one.",
    f"{INCOMPLETE} Some seeds are missing, because a run diverged (its loss was not finite, or ended above that of a "
    "uniform prediction) or has not ended. The others may be the easy ones, so their mean has no p.",
)
SEARCH = (
    "val_bpb on seeds that are not reported. An arm is reported at the vertex of a parabola through the losses within "
    f"{WINDOW:.3f} bits per byte (0.1 nats) of the lowest, of at least {POINTS} rates. The regret is what an error of "
    "the vertex may cost: intervals are wider by it, and p-values count only what is beyond. The optimum is not found "
    f"if fewer than {POINTS} rates are that close, if the vertex is not among them, if the {POINTS} rates nearest to "
    "it have another, or if the reported seeds end further than that from the parabola. Then there is no p-value."
)
LADDER = (
    "The slope is that of a line through an arm's differences, for each doubling of the first arm's FLOPs, a line for "
    f"each seed. A trend is shown if p is below {ALPHA} with at least {SEEDS} seeds. A size does not count (*) if its "
    f"interval is more than {WIDE} times as wide as the best, and by more than chance."
)


# --- sentences -------------------------------------------------------------------------------------------------------


def verdicts(found: Comparison) -> str:
    """What is shown of each arm, and at which learning rates."""
    lrs = {run.lr for run in found.runs}
    rates = f"at learning rate {min(lrs):g}, which was not tuned"
    if len(lrs) > 1:
        rates = "at learning rates that differ and were not tuned"
    if found.search:
        rates = "each at its own best learning rate" if found.tuned else "at learning rates that were not all tuned"
    parts = []
    if found.trends:
        groups = grouped(((slope.words, slope.verdict[1]), arm.name) for arm, slope in found.trends.items())
        said = [f"{trend} for {listed(arms)}" + (f", as {why}" if why else "") for (trend, why), arms in groups.items()]
        parts.append(f"With compute, {'; '.join(said)}.")
    if found.found:
        parts.append(f"Compared with {found.against}, {rates}: {by_verdict(found.found)}.")
    if len(found.arms) == 1:
        ((arm, group),) = found.arms.items()
        parts.append(f"One arm, {arm.name}: val_bpb {mean_of(group.runs)}.")
    elif alone := [arm.name for arm in found.arms if arm not in {*found.found, *map(found.baselines.get, found.found)}]:
        parts.append(f"Not compared, as no other arm has the same text and batches: {listed(alone)}.")
    text = " ".join(parts)
    return text.replace(AT_A_RATE, " at these rates") if len(lrs) > 1 else text


def by_verdict(found: Mapping[Arm, Finding]) -> str:
    """`a and b are better; c is undecided`, with numbers if these are few. Many undecided arms are only counted.

    In a ladder: `a (dim=32, dim=64) is better`.
    """
    few, parts = len(found) <= FEW, []
    groups = grouped(((each.words, *each.verdict), arm) for arm, each in found.items())
    order = [*VERDICTS, NO_VERDICT]
    for words, verdict, reason in sorted(groups, key=lambda key: order.index(key[1])):
        arms = groups[words, verdict, reason]
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


def conditions(found: Comparison, others: Sequence[str]) -> str:
    """`n = 3; 0.2M parameters, 0.5M tokens of python, bfloat16; equal tokens.`"""
    counts = sorted({each.estimate.n for each in found.found.values() if each.estimate})
    parts = [f"n = {' or '.join(map(str, counts))}"] if counts else []
    if sizes := [run.parameters for run in found.runs if run.parameters]:
        texts, dtypes = (values_of(found, name) for name in ("data", "dtype"))
        tokens = f"{span([run.tokens or 0 for run in found.runs])} tokens"
        tokens = " of ".join([tokens, *filter(None, [listed(texts)])])
        parts += [", ".join([f"{span(sizes)} parameters", tokens, *dtypes]), equal_in(found)]
    if others:
        parts.append(f"arms also differ in {listed([name.replace('_', ' ') for name in others])}")
    return "; ".join(parts) + "." if parts else ""


def values_of(found: Comparison, name: str) -> list[str]:
    """The values of an option, without hashes, if those of all runs are known."""
    values = {run.options.get(name, "").partition("@")[0] for run in found.runs}
    return [] if "" in values else sorted(values)


def millions(value: float) -> str:
    return f"{value / 1e6:,.1f}M" if value >= 1e5 else f"{value:,}"


def span(values: Sequence[float], show: Callable[[float], str] = millions) -> str:
    """`0.2M`, or `0.2M to 0.8M`."""
    return " to ".join(dict.fromkeys(map(show, (min(values), max(values)))))


COSTS_OF_A_RUN: dict[str, Callable[[Record], float]] = {
    "tokens": lambda run: run.tokens or math.nan,
    "FLOPs": lambda run: run.flops or math.nan,
    "time": lambda run: run.steps * (run.step_time or math.nan),
}


def relative_costs(found: Comparison, name: str, of_a_step: bool = False) -> dict[Arm, float]:
    """A cost of each arm, of a run or of a step, over that of what it is compared with. NaN if it is not known."""
    cost, runs = COSTS_OF_A_RUN[name], {arm: group.runs[0] for arm, group in found.arms.items()}
    costs = {arm: cost(run) / (run.steps if of_a_step else 1) for arm, run in runs.items()}
    return {arm: each / costs[found.baselines[arm]] for arm, each in costs.items()}


def equal_in(found: Comparison) -> str:
    """The cost that is the same for all arms of a size."""
    for name in COSTS_OF_A_RUN:
        if all(abs(each - 1) <= PRECISE for each in relative_costs(found, name).values()):
            return f"equal {name}"
    return "at different costs"


def resolution(found: Comparison) -> str:
    """What could have been seen, and what a step costs."""
    parts = []
    if detectable := [each.detectable for each in found.found.values() if each.detectable]:
        several = ", the median of all arms" if len(detectable) > 1 else ""
        parts.append(f"Four of five repetitions would show a true difference of {median(detectable):.3f}{several}")
    if changes := [each.detectable * each.doublings for each in found.trends.values() if each.detectable]:
        parts.append(f"the whole ladder would show a change of {median(changes):.3f}")
    for name, what in (("time", "as long"), ("FLOPs", "the FLOPs")):
        relative = relative_costs(found, name, of_a_step=True).items()
        other = grouped((arm.without_size.name, ratio) for arm, ratio in relative if abs(ratio - 1) > PRECISE)
        if len(other) > FEW:
            other = {"": [*chain.from_iterable(other.values())]}
        for arm, ratios in other.items():
            of = f" of {arm}" if arm else ""
            parts.append(f"a step{of} takes {span(ratios, '{:.2f}'.format)} times {what}")
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
    titles = ["arm", f"difference from {found.against} (n)", "verdict", "p", "detectable"]
    titles += ["val_bpb (n)", "lr", "diverged", "relative FLOPs", "relative time"]
    flops, seconds = (relative_costs(found, name) for name in ("FLOPs", "time"))
    rows = []
    for arm in found.ordered:
        runs = found.arms[arm].runs
        columns = columns_of(found.found[arm]) if arm in found.found else [NONE] * 4
        diverged = f"{sum(run.diverged for run in runs)} of {sum(run.ended for run in runs)}"
        costs = [NONE if math.isnan(each) else f"{each:.2f}" for each in (flops[arm], seconds[arm])]
        rows.append([arm.name, *columns, mean_of(runs), f"{runs[0].lr:g}", diverged, *costs])
    return table(titles, rows)


def ladder_table(found: Comparison) -> str:
    """A row for each arm: its slope, and its difference at each size."""
    sizes, rows = found.flops, []
    for arm, slope in found.trends.items():
        marked = {size: f"{statistic(each)}{'*' * (size in slope.left_out)}" for size, each in slope.rungs.items()}
        rows.append([arm.name, *columns_of(slope), *(marked.get(size, NONE) for size in sizes)])
    titles = [f"{size}: {flops:.2g} FLOPs" for size, flops in sizes.items()]
    return table(["arm", "slope for each doubling (n)", "trend", "p", "detectable", *titles], rows)


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
        if group := found.arms.get(arm):
            best = f"{group.runs[0].lr:g}"
            regret = "optimum not found" if group.regret is None else f"{group.regret:.4f}"
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
    records, others = name_arms(records)
    found, ended = compare(records), sum(run.ended for run in records)
    summary = [f"**Partial: the search for learning rates has not ended; {ended} of its runs have.**", "", ""]
    if found.arms:
        summary = [verdicts(found), conditions(found, others), resolution(found)]
        if ended < len(records):
            summary[0] = f"**Partial: {ended} of {len(records)} runs have ended.** {summary[0]}"
    arms = arm_rows(found)
    for name, rows in (("runs", rows_of(records)), ("arms", arms)):
        file = io.StringIO()
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(folder / f"{name}.csv", file.getvalue())
    write_atomically(folder / "report.json", json.dumps(for_scripts(found, summary, arms), indent=2) + "\n")
    machines = known_values(run.machine for run in records)
    about = [f"`{command}`" if command else "", "; ".join([seeds_of(found), *machines]), *notes, *HOW_TO_READ]
    sections, more = [], []
    if found.arms:
        sections += ["## Comparison", comparison_table(found)]
    if found.trends:
        sections += ["## Effect over compute", LADDER, ladder_table(found)]
    if len(found.pairs) > len(found.found):
        more += ["## One factor at a time", factor_table(found)]
    if found.search:
        more += ["## Learning rates", SEARCH, search_table(found)]
    first, middle, last = ("\n\n".join(filter(None, part)) for part in ([*summary, *sections], more, about))
    write_atomically(folder / "table.md", "\n\n".join(filter(None, (first, middle, last))) + "\n")
    figures = figures_of(found)
    for name in ("ladder", "differences", "curves", "watch"):
        for kind in ("png", "svg", "pdf"):
            if name in figures:
                save_plot(figures[name], folder / f"{name}.{kind}")
            else:
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
    parts = [markdown(first), *(figure(plot, alt=f"{name} of the arms") for name, plot in figures.items())]
    parts += [markdown(middle), folded("How to read this", markdown(last))]
    parts += [folded("Settings of the first arm", settings_list(records[0].options))]
    write_atomically(folder / "report.html", page(title_of(found), parts))
    return [*filter(None, summary)]


def arm_rows(found: Comparison) -> list[Row]:
    """The rows of arms.csv."""
    rows = []
    for arm in found.ordered:
        group, run = found.arms[arm], found.arms[arm].runs[0]
        mean = find([*group.bpb.values()], len(group.runs))
        row = {"arm": arm.name, **dict(arm.factors), "lr": run.lr, "seeds": mean.planned, "n": len(mean.values)}
        row |= {"val_bpb": mean.row.get("difference"), "val_bpb_half_width": mean.row.get("half_width")}
        row |= {"diverged": sum(run.diverged for run in group.runs), "dtype": run.options.get("dtype")}
        row |= {name: getattr(run, name) for name in COSTS}
        if group.search:
            row |= {"regret": group.regret, "optimum_found": group.regret is not None}
        rows.append(row | (found.found[arm].row if arm in found.found else {}))
    return rows


def for_scripts(found: Comparison, summary: list[str], arms: list[Row]) -> Row:
    """What report.json contains."""
    runs = found.runs
    pairs = [{"arm": arm.name, "baseline": other.name, **each.row} for (arm, other), each in found.pairs.items()]
    sizes = {"flops": found.flops}
    slopes = [{"arm": arm.name, **each.row, **sizes, "left_out": each.left_out} for arm, each in found.trends.items()]
    return {
        **dict(zip(("summary", "conditions", "resolution"), summary, strict=True)),
        "arms": arms,
        "comparisons": pairs,
        "slopes": slopes,
        "tests": max((each.tests for each in found.pairs.values()), default=0),
        "correction": "Holm",
        "alpha": ALPHA,
        "margin": MARGIN,
        "tuned": found.tuned,
        **{name: known_values(run.options.get(name) for run in runs) for name in ("data", "tokenizer", "dtype")},
        "commits": known_values(run.commit for run in runs),
        "machines": known_values(run.machine for run in runs),
    }


def known_values(values: Iterable[str | None]) -> list[str]:
    return sorted({*filter(None, values)})


def seeds_of(found: Comparison) -> str:
    seeds = sorted({run.seed for run in found.runs})
    return f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}" if seeds else "no seeds yet"


def title_of(found: Comparison) -> str:
    names = [arm.name for arm in found.arms or found.search]
    return ", ".join(names[:TITLE]) + (f" and {len(names) - TITLE} more" if len(names) > TITLE else "")


def figures_of(found: Comparison) -> dict[str, "Figure"]:
    """The plots of a report, by the names of their files."""
    figures: dict[str, Figure] = {}
    styles = arm_styles(found.arms)
    seeds = seeds_of(found)
    if any(each.values for each in found.found.values()):
        title = f"Difference from {found.against}, {seeds}"
        if found.trends:
            plain = arm_styles(dict.fromkeys(arm.without_size for arm in found.arms))
            figures["ladder"] = plot_ladder(found.found, found.flops, title, plain)
        figures["differences"] = plot_differences(found.found, title, styles)
    ended = [run for arm in found.ordered for run in found.arms[arm].runs if run.ended and run.log]
    if curves := plot_curves(ended, styles, f"Means of {seeds}"):
        figures["curves"] = curves
    logs = {run.arm.name: read_rows(run.path / "watch.jsonl") for run in ended}  # of each arm's last seed
    if watched := {name: log for name, log in logs.items() if log}:
        figures["watch"] = plot_streams(watched, styles)
    return figures
