"""A report on runs, all of it from their records: tables, sentences, figures, and files for scripts."""

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from experiments.costs import PRECISE
from experiments.findings import (
    AT_A_RATE,
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
from experiments.rates import POINTS, WINDOW, find_optimum, losses_of
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
SAME = PRECISE  # costs that differ by less are the same
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
    regrets: dict[Arm, float | None]  # of arms that were searched for a rate; None if the best was not found
    baselines: dict[Arm, Arm]  # what each arm is compared with: the first one with its size and text
    pairs: dict[Pair, Finding]
    found: dict[Arm, Finding]  # the difference of each arm from its baseline, the lowest first, but not in a ladder
    trends: dict[Arm, Trend]  # in a ladder
    tests: int  # that are corrected together

    @property
    def ordered(self) -> list[Arm]:
        """Each baseline, and then the arms that are compared with it."""
        bases = dict.fromkeys(self.baselines.values())
        return [arm for base in bases for arm in (base, *self.found) if self.baselines[arm] == base]

    @property
    def against(self) -> str:
        """What arms are compared with."""
        compared = {self.baselines[arm] for arm in self.found}
        names = {arm.without_size.name for arm in compared}
        if len(compared) == 1:
            return name_of(*compared)
        if len(names) == 1:
            return f"{names.pop()} of the same size"
        known = all(run.known for runs in self.arms.values() for run in runs)
        return f"the first arm {'with the same text and batches' if known else 'of its folder'}"


def compare_records(records: list[Record]) -> Comparison:
    """What is found of runs whose arms `name_arms` has named."""
    arms = grouped((each.arm, each) for each in records if not each.search)
    search = grouped((each.arm, each) for each in records if each.search)
    bpb = {arm: final_bpb(runs) for arm, runs in arms.items()}
    regrets = {}
    for arm in arms.keys() & search.keys():
        losses = losses_of(search[arm])
        regrets[arm] = find_optimum(losses).regret_at(arms[arm][0].lr, bpb[arm].values()) if losses else None
    flops = {arm: runs[0].flops for arm, runs in arms.items() if arm.size and runs[0].flops}
    planned = {arm: [run.seed for run in runs] for arm, runs in arms.items()}
    texts = {arm: text_of(runs[0]) for arm, runs in arms.items()}
    baselines = baselines_of([*arms], texts)
    pairs, trends, tests = compare(bpb, planned, regrets, flops, texts) if bpb else ({}, {}, 0)
    found = {arm: each for (arm, other), each in pairs.items() if other == baselines[arm]}
    if not trends:
        found = dict(sorted(found.items(), key=lambda item: item[1].estimate.mean if item[1].estimate else math.inf))
    return Comparison(arms, search, regrets, baselines, pairs, found, trends, tests)


def text_of(record: Record) -> tuple[str, ...]:
    """What runs must share besides the seed to be paired. Where that is not known, the folder."""
    return tuple(record.options.get(name, UNNAMED[name]) for name in PAIRED_BY) if record.known else (record.folder,)


def name_of(arm: Arm) -> str:
    """Its name in a sentence, where a size is a width."""
    return f"{arm.width} {arm.without_size.name}".strip()


# --- sentences -------------------------------------------------------------------------------------------------------


def verdicts(found: Comparison) -> str:
    """What is shown of each arm, and at which learning rates."""
    lrs = {run.lr for runs in found.arms.values() for run in runs}
    rates = f"at learning rate {min(lrs):g}, which was not tuned"
    if len(lrs) > 1:
        rates = "at learning rates that differ and were not tuned"
    if found.regrets:
        all_tuned = found.regrets.keys() >= found.arms.keys()
        rates = "each at its own best learning rate" if all_tuned else "at learning rates that were not all tuned"
    parts = []
    if found.trends:
        groups = grouped(((slope.words, slope.verdict[1]), arm.name) for arm, slope in found.trends.items())
        said = [f"{trend} for {listed(arms)}" + (f", as {why}" if why else "") for (trend, why), arms in groups.items()]
        parts.append(f"With compute, {'; '.join(said)}.")
    if found.found:
        parts.append(f"Compared with {found.against}, {rates}: {by_verdict(found.found)}.")
    if len(found.arms) == 1:
        ((arm, runs),) = found.arms.items()
        parts.append(f"One arm, {arm.name}: val_bpb {mean_of(runs)}.")
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
        names = [f"{name_of(arm)}{numbers(found[arm]) if few else ''}" for arm in arms]
        if arms[0].size and not few:
            at = grouped((arm.without_size.name, arm.width) for arm in arms)
            names = [f"{name} ({', '.join(widths)})" for name, widths in at.items()]
        are = f"{listed(names)} {'are' if len(names) > 1 else 'is'}"
        if verdict in (UNDECIDED, NO_VERDICT) and len(arms) > MANY:
            are = f"{len(arms)} of {len(found)} {'comparisons' if arms[0].size else 'arms'} are"
        if verdict == NO_VERDICT:
            differences = ", ".join(f"{name_of(arm)} {signed(found[arm])}" for arm in arms[:MANY])
            parts.append(f"one seed, so no verdict: {differences}")
        else:
            parts.append(f"{are} {words}" + (f", as {reason}" if reason else ""))
    return "; ".join(parts)


def conditions(found: Comparison, others: Sequence[str]) -> str:
    """`n = 3; 0.2M parameters, 0.5M tokens of python, bfloat16; equal tokens.`"""
    runs = [run for each in found.arms.values() for run in each]
    counts = sorted({each.estimate.n for each in found.found.values() if each.estimate})
    parts = [f"n = {' or '.join(map(str, counts))}"] if counts else []
    known = runs if all(run.known for run in runs) else []
    texts = sorted({run.options["data"].partition("@")[0] for run in known})
    dtypes = sorted({run.options["dtype"] for run in known})
    if sizes := [run.parameters for run in runs if run.parameters]:
        tokens = " of ".join([f"{span([run.tokens or 0 for run in runs])} tokens", *filter(None, [listed(texts)])])
        parts += [", ".join([f"{span(sizes)} parameters", tokens, *dtypes]), equal_in(found)]
    if others:
        parts.append(f"arms also differ in {listed([name.replace('_', ' ') for name in others])}")
    return "; ".join(parts) + "." if parts else ""


def millions(value: float) -> str:
    return f"{value / 1e6:,.1f}M" if value >= 1e5 else f"{value:,}"


def span(values: Sequence[float], show: Callable[[float], str] = millions) -> str:
    """`0.2M`, or `0.2M to 0.8M`."""
    return " to ".join(dict.fromkeys(map(show, (min(values), max(values)))))


COSTS: dict[str, Callable[[Record], float]] = {  # of a run
    "tokens": lambda run: run.tokens or math.nan,
    "FLOPs": lambda run: run.flops or math.nan,
    "time": lambda run: run.steps * (run.step_time or math.nan),
}
STEP_COSTS: dict[str, Callable[[Record], float]] = {
    "as long": lambda run: run.step_time or math.nan,
    "the FLOPs": lambda run: (run.flops or math.nan) / run.steps,
}


def relative_costs(found: Comparison, cost: Callable[[Record], float]) -> dict[Arm, float]:
    """The cost of each arm over that of what it is compared with. NaN if it is not known."""
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
    for what, cost in STEP_COSTS.items():
        relative = relative_costs(found, cost).items()
        other = grouped((arm.without_size.name, ratio) for arm, ratio in relative if abs(ratio - 1) > SAME)
        if len(other) > FEW:
            other = {"": [*chain.from_iterable(other.values())]}
        for name, ratios in other.items():
            of = f" of {name}" if name else ""
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
    names = [name.replace("_", " ") for name, _ in next(iter(found.arms)).factors]
    titles = [*names, f"difference from {found.against} (n)", "verdict", "p", "detectable"]
    titles += ["val_bpb (n)", "lr", "diverged", "relative FLOPs", "relative time"]
    flops, seconds = (relative_costs(found, COSTS[name]) for name in ("FLOPs", "time"))
    rows = []
    for arm in found.ordered:
        runs = found.arms[arm]
        columns = columns_of(found.found[arm]) if arm in found.found else [NONE] * 4
        diverged = f"{sum(run.diverged for run in runs)} of {sum(run.ended for run in runs)}"
        costs = [NONE if math.isnan(each) else f"{each:.2f}" for each in (flops[arm], seconds[arm])]
        rows.append([*dict(arm.factors).values(), *columns, mean_of(runs), f"{runs[0].lr:g}", diverged, *costs])
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
        regret = found.regrets.get(arm, math.nan)
        best = f"{found.arms[arm][0].lr:g}" if arm in found.arms else NONE
        said = "optimum not found" if regret is None else NONE if math.isnan(regret) else f"{regret:.4f}"
        rows.append([*row, best, said])
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
    found, ended = compare_records(records), sum(run.ended for run in records)
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
    sections = []
    if found.arms:
        sections += ["## Comparison", comparison_table(found)]
    if found.trends:
        sections += ["## Effect over compute", LADDER, ladder_table(found)]
    if len(found.pairs) > len(found.found):
        sections += ["## One factor at a time", factor_table(found)]
    if found.search:
        sections += ["## Learning rates", SEARCH, search_table(found)]
    first = "\n\n".join(filter(None, [*summary, *sections]))
    last = "\n\n".join(filter(None, about))
    write_atomically(folder / "table.md", f"{first}\n\n{last}\n")
    figures = figures_of(found)
    for name in ("ladder", "differences", "curves", "watch"):
        for kind in ("png", "svg", "pdf"):
            if name in figures:
                save_plot(figures[name], folder / f"{name}.{kind}")
            else:
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
    parts = [markdown(first), *(figure(plot, alt=f"{name} of the arms") for name, plot in figures.items())]
    parts += [folded("How to read this", markdown(last))]
    parts += [folded("Settings of the first arm", settings_list(records[0].options))]
    write_atomically(folder / "report.html", page(title_of(found), parts))
    return [*filter(None, summary)]


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
        if arm in found.regrets:
            row |= {"regret": found.regrets[arm], "optimum_found": found.regrets[arm] is not None}
        rows.append(row | (found.found[arm].row if arm in found.found else {}))
    return rows


def for_scripts(found: Comparison, summary: list[str], arms: list[Row]) -> Row:
    """What report.json contains."""
    runs = [run for each in found.arms.values() for run in each]
    pairs = [{"arm": arm.name, "baseline": other.name, **each.row} for (arm, other), each in found.pairs.items()]
    sizes = {"flops": flops_of(found)}
    slopes = [{"arm": arm.name, **each.row, **sizes, "left_out": each.left_out} for arm, each in found.trends.items()]
    return {
        **dict(zip(("summary", "conditions", "resolution"), summary, strict=True)),
        "arms": arms,
        "comparisons": pairs,
        "slopes": slopes,
        "tests": found.tests,
        "correction": "Holm",
        "alpha": ALPHA,
        "margin": MARGIN,
        "tuned": bool(found.regrets) and found.regrets.keys() >= found.arms.keys(),
        **{name: known_values(run.options.get(name) for run in runs) for name in ("data", "tokenizer", "dtype")},
        "commits": known_values(run.commit for run in runs),
        "machines": known_values(run.machine for run in runs),
    }


def known_values(values: Iterable[str | None]) -> list[str]:
    return sorted({*filter(None, values)})


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
        named = {arm.name: each for arm, each in found.found.items()}
        figures["differences"] = plot_differences(named, title, styles)
    ended = [run for arm in found.ordered for run in found.arms[arm] if run.ended and run.log] if found.arms else []
    if ended:
        figures["curves"] = plot_curves(ended, styles, f"Means of {seeds}")
    logs = {run.arm.name: read_rows(run.path / "watch.jsonl") for run in ended}  # of each arm's last seed
    if watched := {name: log for name, log in logs.items() if log}:
        figures["watch"] = plot_streams(watched, styles)
    return figures
