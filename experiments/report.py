"""A report on runs, all of it from their records: tables, sentences, figures, and files for scripts."""

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from experiments.costs import PRECISE
from experiments.findings import AS_GOOD, MARGIN, NO_VERDICT, SEEDS, VERDICTS, Comparison, Finding, compare
from experiments.markdown import markdown
from experiments.plots import figures_of
from experiments.rates import POINTS, WINDOW
from experiments.records import COSTS, Arm, Record, final_bpb, grouped, name_arms, rows_of, shown
from experiments.statistics import ALPHA
from files import write_atomically
from pages.html import details, figure, page, save_plot, settings_list
from runtime.run_dir import Row

NONE = "–"
INCOMPLETE = "†"  # beside a statistic that does not rest on all seeds
FEW = 3  # compared arms; the conclusion has no numbers of more
HOW_TO_READ = (
    "A statistic is a mean over n seeds ± the half-width of its 95% interval (Student's t). Differences are paired: "
    "each seed gives both arms the same batches and, as far as shapes allow, the same initial weights. Below zero is "
    "better. p is of a paired t test, corrected for all tests of this report (Holm); an interval is for one. "
    f"`detectable` is about the true difference with which four of five repetitions have a p below {ALPHA}, on average "
    "over reports. All this is about chance in seeds, not about other texts.",
    f"An arm is {AS_GOOD} if its whole interval lies between -{MARGIN} and {MARGIN}, which is not corrected for the "
    f"number of arms: of many, one may be by chance. Otherwise it is better or worse if p is below {ALPHA} with at "
    f"least {SEEDS} seeds. Else it is undecided, which does not mean equal. At a rate that was not searched for, it is "
    "only better at this rate: equal arms often differ at one.",
)
SEEDS_ARE_MISSING = (
    f"{INCOMPLETE} Some seeds are missing, because a run diverged (its loss was not finite, or ended above that of a "
    "uniform prediction) or has not ended. The others may be the easy ones, so their mean has no p."
)
SEARCH = (
    "val_bpb on seeds that are not reported. An arm is reported at the vertex of a parabola through the losses within "
    f"{WINDOW:.3f} bits per byte (0.1 nats) of the lowest, of at least {POINTS} rates. The regret is what an error of "
    "the vertex may cost: intervals are wider by it, and p counts only what is beyond. The optimum is not found if "
    f"fewer than {POINTS} rates are that close, if the vertex is not among them, if the {POINTS} nearest to it have "
    "another, or if the reported seeds end further than that from the parabola. Then there is no p."
)
LADDER = (
    "The slope is that of a line through an arm's differences, for each doubling of the first arm's FLOPs, a line for "
    f"each seed. A difference that falls is a gain. It is shown if p is below {ALPHA} with at least {SEEDS} seeds. "
    "A run of the first arm has these FLOPs: "
)


# --- sentences -------------------------------------------------------------------------------------------------------


def verdicts(found: Comparison) -> str:
    """What is shown of each arm, and at which learning rates."""
    rates = f"at learning rate {span([run.lr for run in found.runs], '{:g}'.format)}, which was not tuned"
    if found.search:
        rates = "each at its own best learning rate" if found.tuned else "at learning rates that were not all tuned"
    parts = []
    if found.trends:
        groups = grouped(((slope.words, slope.verdict[1]), arm.name) for arm, slope in found.trends.items())
        trends = [f"{words} for {listed(arms)}{f', as {why}' if why else ''}" for (words, why), arms in groups.items()]
        parts.append(f"With compute, {'; '.join(trends)}.")
    if found.found:
        parts.append(f"Compared with {found.against}, {rates}: {by_verdict(found.found)}.")
    bases = [*found.baselines.values()]
    alone = [f"{arm.name} (val_bpb {mean_of(found.arms[arm].runs)})" for arm in bases if bases.count(arm) == 1]
    if alone:
        parts.append(f"Not compared, as no other arm has the same text and batches: {listed(alone)}.")
    return " ".join(parts)


def by_verdict(found: dict[Arm, Finding]) -> str:
    """`a and b are better; c is undecided`, with numbers if these are few."""
    few = len(found) <= FEW
    parts = []
    groups = grouped(((each.verdict, each.words), arm) for arm, each in found.items())
    for ((verdict, reason), words), arms in sorted(groups.items(), key=lambda item: VERDICTS.index(item[0][0][0])):
        if verdict == NO_VERDICT:
            parts.append(f"one seed, so no verdict: {', '.join(f'{arm.name} {signed(found[arm])}' for arm in arms)}")
            continue
        names = [f"{arm.name}{numbers(found[arm]) if few else ''}" for arm in arms]
        because = f", as {reason}".replace(f" {arms[0].name}'s ", " its ") if reason else ""
        parts.append(f"{listed(names)} {'are' if len(names) > 1 else 'is'} {words}{because}")
    others = dict.fromkeys(reason for each in found.values() for reason in each.missing[1:])  # of baselines
    return "; ".join([*parts, *(reason for reason in others if reason not in "".join(parts))])


def conditions(found: Comparison, others: Sequence[str], commits: Sequence[str]) -> str:
    """`n = 3; 0.2M parameters, 0.5M tokens of python, bfloat16; equal tokens.`"""
    counts = sorted({len(each.values) for each in found.found.values()} - {0})
    parts = [f"n = {' or '.join(map(str, counts))}"] if counts else []
    if sizes := [run.parameters for run in found.runs if run.parameters]:
        parts += [f"{span(sizes)} parameters, {span([run.tokens or 0 for run in found.runs if run.parameters])} tokens"]
        if all(run.known for run in found.runs):
            texts = dict.fromkeys(text.rpartition("@")[0] or text for text in known_values(found.runs, "data"))
            parts[-1] += f" of {', '.join([listed([*texts]), *known_values(found.runs, 'dtype')])}"
        parts.append(equal_in(found))
    if lost := [100 * run.lost for run in found.runs if run.lost]:
        whose = f"the tokenizer of {'some' if len(lost) < len(found.runs) else 'all'} arms"
        parts.append(f"lossy: {whose} loses {span(lost, '{:.3g}%'.format)} of the text")
    if len(commits) > 1:
        parts.append(f"runs differ in their commit: {listed(commits)}")
    if others:
        parts.append(f"arms also differ in {listed([name.replace('_', ' ') for name in others])}")
    return f"{'; '.join(parts)}." if parts else ""


def millions(value: float) -> str:
    """In millions, or as it is below a tenth of one."""
    return f"{value / 1e6:,.1f}M" if value >= 1e5 else f"{value:,}"


def span(values: Sequence[float], show: Callable[[float], str] = millions) -> str:
    """`0.2M`, or `0.2M to 0.8M`."""
    return " to ".join(dict.fromkeys(map(show, (min(values), max(values)))))


def relative_costs(found: Comparison, name: str, of_a_step: bool = False) -> dict[Arm, float]:
    """A cost of each arm, of a run or of a step, over that of what it is compared with. NaN if it is not known."""
    costs = {}
    for arm, group in found.arms.items():
        run = group.runs[0]
        costs[arm] = run.costs[name] / (run.steps if of_a_step else 1)
    return {arm: each / costs[found.baselines[arm]] for arm, each in costs.items()}


def equal_in(found: Comparison) -> str:
    """The cost that is the same for all arms of a size."""
    for name in ("tokens", "time", "FLOPs"):
        if all(abs(each - 1) <= PRECISE * (name != "tokens") for each in relative_costs(found, name).values()):
            return f"equal {name}"
    return "at unequal or unknown costs"


def resolution(found: Comparison) -> str:
    """What could have been seen, and what a step costs."""
    parts = []
    if detectable := [each.detectable for each in found.found.values() if each.detectable]:
        several = ", the median of all arms" if len(detectable) > 1 else ""
        parts.append(
            f"Four of five repetitions would show a true difference of about {median(detectable):.3f}{several}"
            f"{f', or call it {AS_GOOD}' if median(detectable) < MARGIN else ''}"
        )
    if changes := [each.detectable * each.doublings for each in found.trends.values() if each.detectable]:
        parts.append(f"the whole ladder would show a change of about {median(changes):.3f}")
    for name, what in (("time", "as long"), ("FLOPs", "the FLOPs")):
        relative = relative_costs(found, name, of_a_step=True)
        others = grouped((arm.without_size.name, each) for arm, each in relative.items() if abs(each - 1) > PRECISE)
        spans = grouped((span(ratios, "{:.2f}".format), name) for name, ratios in others.items())
        parts += [f"a step of {listed(names)} takes {ratio} times {what}" for ratio, names in spans.items()]
    return f"{parts[0][0].upper()}{'; '.join(parts)[1:]}." if parts else ""


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def numbers(finding: Finding) -> str:
    """` (−0.040 ± 0.033, p = 0.035)`, or nothing if some seeds are missing."""
    if not finding.complete or len(finding.values) == 1:
        return ""
    return f" ({signed(finding)}{'' if finding.p is None else f', p = {finding.p:.3g}'})"


def signed(finding: Finding) -> str:
    return f"{finding.estimate:+.3f}".replace("-", "−")


# --- tables ----------------------------------------------------------------------------------------------------------


def statistic(finding: Finding, spec: str = "+.4f") -> str:
    """`1.7642 ± 0.0031 (3)`, or `1.7642 ± 0.0031 (2 of 3)†` if it does not rest on all seeds; a dash for none."""
    n = len(finding.values)
    count = f"({n})" if finding.complete else f"({n} of {finding.planned}){INCOMPLETE}"
    return f"{finding.estimate:{spec}} {count}" if n else NONE


def mean_of(runs: Sequence[Record]) -> str:
    return statistic(Finding([*final_bpb(runs).values()], len(runs)), ".4f")


def columns_of(finding: Finding) -> list[str]:
    """A difference, the verdict, p, and what is detectable."""
    detectable = NONE if finding.detectable is None else f"{finding.detectable:.4f}"
    p = NONE if finding.p is None else f"{finding.p:.3g}"
    return [statistic(finding), finding.words, p, detectable]


def comparison_table(found: Comparison) -> str:
    """A row for each arm: the difference and the verdict first, then what they rest on."""
    relative = [relative_costs(found, name) for name in ("FLOPs", "time")]
    rows = []
    for arm in found.ordered:
        runs = found.arms[arm].runs
        columns = columns_of(found.found[arm]) if arm in found.found else [NONE] * 4
        diverged = f"{sum(run.diverged for run in runs)} of {sum(run.ended for run in runs)}"
        costs = [NONE if math.isnan(each[arm]) else f"{each[arm]:.2f}" for each in relative]
        rows.append([arm.name, *columns, mean_of(runs), f"{runs[0].lr:g}", diverged, *costs])
    effect = ("arm", f"difference from {found.against} (n)", "verdict", "p", "detectable")
    return table([*effect, "val_bpb (n)", "lr", "diverged", "relative FLOPs", "relative time"], rows)


def search_table(found: Comparison) -> str:
    """A row for each arm and a column for each learning rate."""
    lrs = sorted({run.lr for runs in found.search.values() for run in runs})
    rows = []
    for arm, runs in found.search.items():
        row = [arm.name]
        for lr in lrs:
            tried = [run for run in runs if run.lr == lr]
            mean = mean_of(tried)
            row.append("diverged" if mean == NONE and any(run.diverged for run in tried) else mean)
        if group := found.arms.get(arm):
            row += [f"{group.runs[0].lr:g}", "optimum not found" if group.regret is None else f"{group.regret:.4f}"]
        rows.append(row if group else [*row, NONE, NONE])
    return table(["arm", *(f"{lr:g}" for lr in lrs), "reported at", "regret"], rows)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(cell.replace('|', '¦') for cell in line)} |" for line in (titles, *rows))
    return "\n".join([first, "|---" * len(titles) + "|", *others])


# --- files -----------------------------------------------------------------------------------------------------------


def make_report(folder: Path, records: list[Record], command: str = "") -> list[str]:
    """Write `runs.csv`, `arms.csv`, `report.json`, `table.md`, `report.html` and the figures. Returns the summary."""
    records, others = name_arms(records)
    found = compare(records)
    ended = sum(run.ended for run in records)
    machines = known_values(records, "machine")
    commits = known_values(records, "commit")
    summary = [f"**Partial: the search for learning rates has not ended; {ended} of its runs did.**", "", ""]
    if found.arms:
        summary = [verdicts(found), conditions(found, others, commits), resolution(found)]
        if ended < len(records):
            summary[0] = f"**Partial: {ended} of {len(records)} runs ended.** {summary[0]}"

    arms = arm_rows(found)
    for name, rows in (("runs", rows_of(records)), ("arms", arms)):
        file = io.StringIO()
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(folder / f"{name}.csv", file.getvalue())
    origin = {"machines": machines, "commits": commits, "seconds": sum(run.seconds or 0.0 for run in records)}
    write_atomically(folder / "report.json", json.dumps(for_scripts(found, summary, arms) | origin, indent=2) + "\n")

    sections = [*summary]
    if found.arms:
        sections += ["## Comparison", comparison_table(found)]
    if found.trends:
        sizes = f"{'; '.join(f'{size}: {flops:.2g}' for size, flops in found.flops.items())}."
        slopes = [[arm.name, *columns_of(slope)] for arm, slope in found.trends.items()]
        ladder = table(["arm", "slope for each doubling (n)", "trend", "p", "detectable"], slopes)
        sections += ["## Effect over compute", LADDER + sizes, ladder]
    if found.search:
        sections += ["## Learning rates", SEARCH, search_table(found)]
    first = "\n\n".join(filter(None, sections))
    about = ["; ".join([found.seeds, *machines]), *HOW_TO_READ]
    if command:
        about = [f"`{command}`", *about]
    if INCOMPLETE in first:
        about.append(SEEDS_ARE_MISSING)
    last = "\n\n".join(about)
    write_atomically(folder / "table.md", f"{first}\n\n{last}\n")

    parts = [markdown(first)]
    for name, plot in figures_of(found).items():
        for kind in ("png", "svg", "pdf"):
            save_plot(plot, folder / f"{name}.{kind}")
        parts.append(figure(plot, alt=f"{name} of the arms"))
    parts.append(details("How to read this", markdown(last)))
    parts.append(details("Settings of the first arm", settings_list(records[0].options)))
    title = f"{folder.resolve().name}: {listed([*{arm.without_size.name: 0 for arm in found.arms or found.search}])}"
    write_atomically(folder / "report.html", page(title, parts))
    return [*filter(None, summary)]


def arm_rows(found: Comparison) -> list[Row]:
    """The rows of arms.csv."""
    rows = []
    for arm in found.ordered:
        group = found.arms[arm]
        run = group.runs[0]
        mean = Finding([*group.bpb.values()], len(group.runs)).row
        row = {
            "arm": arm.name,
            **dict(arm.factors),
            "lr": run.lr,
            "seeds": len(group.runs),
            "n": len(group.bpb),
            "val_bpb": mean.get("difference"),
            "val_bpb_half_width": mean.get("half_width"),
            "diverged": sum(run.diverged for run in group.runs),
            "dtype": run.options.get("dtype"),
            **{name: getattr(run, name) for name in (*COSTS, "lost")},
        }
        if group.search:
            row |= {"regret": group.regret, "optimum_found": group.regret is not None}
        rows.append(row | (found.found[arm].row if arm in found.found else {}))
    return rows


def for_scripts(found: Comparison, summary: list[str], arms: list[Row]) -> Row:
    """What report.json contains."""
    return {
        **dict(zip(("summary", "conditions", "resolution"), summary, strict=True)),
        "arms": arms,
        "comparisons": [
            {"arm": arm.name, "baseline": other.name, **each.row} for (arm, other), each in found.pairs.items()
        ],
        "slopes": [{"arm": arm.name, **each.row, "flops": found.flops} for arm, each in found.trends.items()],
        "tests": found.tests,
        "correction": "Holm",
        "alpha": ALPHA,
        "margin": MARGIN,
        "tuned": found.tuned,
        **{name: known_values(found.runs, name) for name in ("data", "tokenizer", "dtype")},
    }


def known_values(runs: Sequence[Record], name: str) -> list[str]:
    """Those of a column of runs.csv or an option, in alphabetical order."""
    return sorted({shown((vars(run) | run.options).get(name, "")) for run in runs} - {""})
