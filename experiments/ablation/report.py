"""What an ablation found, in numbers and in words: differences between arms, tables, the conclusion.

A difference rests on the seeds with which the runs of both arms ended and did not diverge. If these are not all
seeds, they may be the easy ones. If an arm's best learning rate was not found, the difference may be one of
tuning. Neither has a p-value, and the tables mark it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import mul
from statistics import fmean
from typing import Any, NamedTuple

from experiments.ablation.grid import Cell, Outcomes
from experiments.ablation.outcome import Arm, BySeed, Outcome, final_bpb, grouped
from experiments.ablation.rates import POINTS, WINDOW, Optimum
from experiments.statistics import ALPHA, Estimate, estimate, holm
from runtime.run_dir import Row

NONE = "–"
INCOMPLETE = "†"  # beside a statistic that does not rest on all seeds
MARGIN = 0.01  # a difference in val_bpb that does not matter
SEEDS = 3  # fewer call no arm better or worse
VERDICTS = BETTER, WORSE, AS_GOOD, UNDECIDED = "better", "worse", f"as good up to {MARGIN}", "undecided"
PARTIAL = "**Partial: "  # the beginning of a report on runs that have not all ended
FEW = 3  # compared arms; the conclusion has no numbers of more
MANY = 6  # more arms that are undecided for one reason are counted in the conclusion, not named
HOW_TO_READ = (
    "A statistic is a mean over n seeds ± the half-width of its 95% interval (Student's t). Differences from the "
    "first arm, or the first of a size, are paired: as far as their shapes allow, each seed gives both arms the same "
    "initial weights and batches. Below zero is better. p tests for no difference (paired t test). All p-values of "
    "this report are corrected together (Holm); each interval is for one comparison. `detectable` is about the "
    "smallest true difference that so many seeds show in four of five experiments, with the strictest correction; for "
    "two or three seeds it is too small, by up to a quarter. These statistics are about chance in seeds, not about "
    "other texts. A run diverged if its loss was not finite, or ended above that of a uniform prediction.",
    f"An arm is {AS_GOOD} if its whole interval lies between -{MARGIN} and {MARGIN}. The interval is for one "
    "comparison, so among many arms, one that is a little worse may be called as good by chance. Otherwise an arm is "
    f"better or worse if p is below {ALPHA} with at least {SEEDS} seeds: two show a true difference so seldom that "
    "most of what they seem to show is chance. Else it is undecided, which does not mean equal.",
    f"{INCOMPLETE} Some seeds are missing, because a run diverged or has not ended. The others may be the easy "
    "ones, so their mean is not comparable and has no p.",
)
LADDER = (
    "The slope is that of a line through an arm's differences, for each doubling of the first arm's FLOPs. Each seed "
    f"has its own line. A trend is shown if p is below {ALPHA} with at least {SEEDS} seeds."
)
Pair = tuple[Arm, Arm]  # an arm, and the one that it is compared with


# --- numbers ---------------------------------------------------------------------------------------------------------


@dataclass
class Finding:
    """A mean over seeds, of losses or of differences. It has a p-value if it can be tested."""

    estimate: Estimate | None  # None if no seed is left
    planned: int  # seeds it should rest on
    tuned: bool = True  # whether the optimum of every arm in it is known
    values: Sequence[float] = ()  # one for each seed
    slack: float = 0.0  # what errors of learning rates may cost
    p: float | None = None  # tests "the mean is 0", corrected for all findings of a report

    @property
    def complete(self) -> bool:
        return self.estimate is not None and self.estimate.n == self.planned

    def __str__(self) -> str:
        """Its numbers in a sentence, if there are any."""
        p = "" if self.p is None else f", p = {digits_of(self.p)}"
        return f" ({self.estimate}{p})" if self.complete else ""

    @property
    def verdict(self) -> tuple[str, str]:
        """One of `VERDICTS` on the first arm of a difference, and why nothing can be decided."""
        found = self.estimate
        if found is None or not self.complete:
            ended = "runs diverged or have not ended, here or in the baseline"
            return UNDECIDED, ended if self.planned else "no seed is in common"
        if not self.tuned:
            return UNDECIDED, "the best learning rate was not found, here or in the baseline"
        if self.p is None:
            return UNDECIDED, "a single seed cannot tell a difference from chance"
        if max(-found.low, found.high) < MARGIN:
            return AS_GOOD, ""
        if self.p >= ALPHA:
            return UNDECIDED, ""
        if found.n < SEEDS:
            return UNDECIDED, "two seeds are too few to tell"
        return WORSE if found.mean > 0 else BETTER, ""

    @property
    def detectable(self) -> float | None:
        return self.estimate.detectable if self.complete and self.estimate else None

    @property
    def row(self) -> Row:
        """For scripts. What is not known is missing."""
        found, (verdict, reason) = self.estimate, self.verdict
        numbers = {"difference": found.mean, "half_width": found.half_width, "pairs": found.n} if found else {}
        return numbers | {"detectable": self.detectable, "p": self.p, "verdict": verdict, "reason": reason}


@dataclass
class Trend(Finding):
    """The mean slope of an effect over compute."""

    ends: tuple[float, float] = (0.0, 0.0)  # the effect at the smallest and at the largest size, on the line
    rungs: Sequence[Finding] = ()  # the effect at each size

    @property
    def verdict(self) -> tuple[str, str]:
        if self.p is None or self.p >= ALPHA or len(self.values) < SEEDS:
            return "no trend shown", super().verdict[1]
        shown = self.rungs[0].verdict[0], self.rungs[-1].verdict[0]
        if {*shown} == {BETTER, WORSE}:
            return f"{shown[0]} turns into {shown[1]}", ""
        first, last = self.ends
        if first * last < 0:
            return "the difference falls" if last < first else "the difference rises", ""
        return "the gap grows" if abs(last) > abs(first) else "the gap closes", ""


def find(values: Sequence[float], planned: int, slack: float = 0.0, tests: int = 1, known: bool = True) -> Finding:
    """The finding of these values. Its p is not corrected yet."""
    measured = estimate(values, slack, tests) if values else None
    p = measured.p if measured and measured.n == planned and known else None
    return Finding(measured, planned, known, values, slack, p)


def compare(
    bpb: Mapping[Arm, BySeed],
    planned: Mapping[Arm, Collection[int]],
    regrets: Mapping[Arm, float | None] = {},
    flops: Mapping[Arm, float] = {},
) -> tuple[dict[Pair, Finding], dict[Arm, Trend]]:
    """The differences of `pairs_of` the arms, paired by seed, and `trends_of` these in a ladder.

    `planned` are the seeds of each arm, with those of runs that diverged or have not ended. `regrets` is what the
    error of an arm's learning rate is expected to cost, None if the best rate was not found. Holm's method
    corrects all p-values together. One that is missing counts as a comparison that found nothing: which runs
    diverge is chance too, so they must not make the correction of the others milder. Arms with no seed in common are no
    comparison.
    """
    found, pairs = {}, pairs_of([*bpb])
    shared = {pair: len(set(planned[pair[0]]) & set(planned[pair[1]])) for pair in pairs}
    tests = sum(map(bool, shared.values())) + len({arm.without_size for arm, _ in pairs} if flops else ())
    for arm, other in pairs:
        costs = [regrets.get(each, 0.0) for each in (arm, other)]
        values = [bpb[arm][seed] - bpb[other][seed] for seed in sorted(bpb[arm].keys() & bpb[other].keys())]
        slack = sum(cost or 0.0 for cost in costs)
        found[arm, other] = find(values, shared[arm, other], slack, tests, None not in costs)
    trends = trends_of(found, flops, tests) if found and flops else {}
    everything = [each for each in (*found.values(), *trends.values()) if each.planned]
    corrected = holm([1.0 if each.p is None else each.p for each in everything])
    for each, p in zip(everything, corrected, strict=True):
        each.p = None if each.p is None else p
    return found, trends


def trends_of(found: Mapping[Pair, Finding], flops: Mapping[Arm, float], tests: int) -> dict[Arm, Trend]:
    """The slope of each arm's effect: val_bpb for each doubling of the baseline's FLOPs, one slope for each seed.

    Keys are arms without their size. There is a slope only if the effect is known at every size. They are some of
    so many `tests` that are corrected together.
    """
    x = {other.size: math.log2(flops[other]) for _, other in found}
    middle = fmean(x.values())
    spread = sum((each - middle) ** 2 for each in x.values())
    trends: dict[Arm, Trend] = {}
    for plain, rungs in grouped((arm.without_size, (arm.size, each)) for (arm, _), each in found.items()).items():
        weights = [(x[size] - middle) / spread for size, _ in rungs]
        effects = [each for _, each in rungs]
        slopes: list[float] = []
        if len(rungs) == len(x) and all(each.complete for each in effects):
            by_seed = zip(*(each.values for each in effects), strict=True)
            slopes = [sum(map(mul, weights, values)) for values in by_seed]
        slack = sum(abs(weight) * each.slack for weight, each in zip(weights, effects, strict=True))
        planned, tuned = min(each.planned for each in effects), all(each.tuned for each in effects)
        trends[plain] = trend = Trend(**vars(find(slopes, planned, slack, tests, tuned)), rungs=effects)
        if trend.estimate:
            mean = fmean(value for each in effects for value in each.values)
            first, last = (mean + trend.estimate.mean * (end - middle) for end in (min(x.values()), max(x.values())))
            trend.ends = first, last
    return trends


def pairs_of(arms: Sequence[Arm]) -> list[Pair]:
    """Each arm and the first one. If several factors vary, also each and the one with the first value of a factor.

    In a ladder, each arm and the first one of its size.
    """
    if arms[0].size:
        baselines = {arm.size: arm for arm in reversed(arms)}
        return [(arm, baselines[arm.size]) for arm in arms if arm != baselines[arm.size]]
    pairs = [(arm, arms[0]) for arm in arms[1:]]
    for arm, (index, first) in product(arms, enumerate(arms[0].factors)):
        other = Arm((*arm.factors[:index], first, *arm.factors[index + 1 :]))
        if other in arms and other != arm:
            pairs.append((arm, other))
    return list(dict.fromkeys(pairs))


# --- Markdown --------------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """What is found of all arms."""

    pairs: dict[Pair, Finding]
    found: dict[Arm, Finding]  # those pairs whose second arm is the baseline, or that of its size
    trends: dict[Arm, Trend]  # in a ladder
    rows: dict[Arm, Row]  # for scripts
    text: list[str]  # first the conclusion


def comparison_section(
    cells: Sequence[Cell],
    outcomes: Outcomes,
    optima: Mapping[Arm, Optimum] = {},
    flops: Mapping[Arm, float] = {},
) -> Comparison:
    """What is found of the planned `cells`, an arm at one learning rate each.

    `optima` are given if learning rates were searched for, and `flops` of a run of each arm in a ladder.
    """
    lrs = {cell.arm: cell.lr for cell in cells}
    runs = {arm: [outcomes[cell] for cell in cells if cell in outcomes and cell.arm == arm] for arm in lrs}
    bpb = {arm: final_bpb(ended) for arm, ended in runs.items()}
    seeds = grouped((cell.arm, cell.seed) for cell in cells)
    known = {arm: each.regret if each.holds(bpb[arm].values()) else None for arm, each in optima.items()}
    baseline, lr = next(iter(lrs.items()))
    pairs, trends = compare(bpb, seeds, known, flops)
    found = {arm: each for (arm, other), each in pairs.items() if other == baseline or baseline.size}
    lines, rows = [], {}
    for arm, ended in runs.items():
        levels = dict(arm.factors) | {"lr": f"{lrs[arm]:g}"}  # `compare` may have lr as a factor
        mean, diverged = find([*bpb[arm].values()], len(seeds[arm])), sum(run.diverged for run in ended)
        *columns, verdict = columns_of(found[arm]) if arm in found else [NONE] * 4
        lines.append([*levels.values(), statistic(mean, ".4f"), *columns, f"{diverged} of {len(ended)}", verdict])
        row = {"arm": arm.name, **levels, "lr": lrs[arm], "seeds": mean.planned, "n": len(bpb[arm])}
        row |= {"val_bpb": mean.row.get("difference"), "val_bpb_half_width": mean.row.get("half_width")}
        rows[arm] = row | {"diverged": diverged} | (found[arm].row if arm in found else {})
    titles = [name.replace("_", " ") for name in levels]
    against = f"{baseline.without_size.name} of the same size" if baseline.size else baseline.name
    titles += ["val_bpb (n)", f"paired difference from {against} (n)", "detectable", "p", "diverged", "verdict"]
    means = (f"{arm.width} {line[len(levels)]}".strip() for arm, line in zip(runs, lines, strict=True))
    alone = f"One arm, {baseline.without_size.name}: val_bpb {', '.join(means)}."
    conclusion = f"Compared with {against}: {by_verdict(found)}." if found else alone
    if counts := sorted({finding.estimate.n for finding in found.values() if finding.estimate}):
        rates = f"all at learning rate {lr:g}" if len(set(lrs.values())) == 1 else "each at its own learning rate"
        conclusion += f" In bits per byte (val_bpb), n = {' or '.join(map(str, counts))}, {rates}."
    text = [conclusion, "## Comparison", table(titles, lines)]
    text += within(pairs) if len(pairs) > len(found) else []
    if trends:
        sentence, *section = over_compute(trends, pairs, flops)
        text = [f"{sentence} {conclusion}", *section, *text[1:]]
    return Comparison(pairs, found, trends, rows, text)


def over_compute(trends: Mapping[Arm, Trend], pairs: Mapping[Pair, Finding], flops: Mapping[Arm, float]) -> list[str]:
    """What a ladder shows, in a sentence and in a section with a row for each arm."""
    titles = {other.size: f"{flops[other]:.2g} FLOPs" for _, other in pairs}
    rows = []
    for arm, slope in trends.items():
        effects = {rung.size: each for (rung, _), each in pairs.items() if rung.without_size == arm}
        known = [statistic(effects[size]) if size in effects else NONE for size in titles]
        rows.append([arm.name, *known, *columns_of(slope)])
    header = ["arm", *titles.values(), "slope for each doubling (n)", "detectable", "p", "trend"]
    groups = grouped((slope.verdict, arm.name) for arm, slope in trends.items())
    said = [f"{trend} for {listed(names)}" + (f", as {why}" if why else "") for (trend, why), names in groups.items()]
    return [f"With compute, {'; '.join(said)}.", "## Effect over compute", LADDER, table(header, rows)]


def by_verdict(found: Mapping[Arm, Finding]) -> str:
    """`a and b are better; c is undecided`, with numbers if these are few. Many undecided arms are only counted.

    In a ladder: `a (dim=32, dim=64) is better`.
    """
    few, parts = len(found) <= FEW, []
    groups = grouped((each.verdict, arm) for arm, each in found.items())
    for verdict, reason in sorted(groups, key=lambda key: VERDICTS.index(key[0])):
        arms = groups[verdict, reason]
        names = [f"{arm.name}{found[arm] if few else ''}" for arm in arms]
        if arms[0].size and not few:
            at = grouped((arm.without_size.name, arm.width) for arm in arms)
            names = [f"{name} ({', '.join(widths)})" for name, widths in at.items()]
        are = f"{listed(names)} {'are' if len(names) > 1 else 'is'}"
        if verdict == UNDECIDED and len(arms) > MANY:
            are = f"{len(arms)} of {len(found)} {'comparisons' if arms[0].size else 'arms'} are"
        parts.append(f"{are} {verdict}" + (f", as {reason}" if reason else ""))
    return "; ".join(parts)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def within(pairs: Mapping[Pair, Finding]) -> list[str]:
    """The section on arms that differ in one factor, such as post − pre within AdamW."""
    rows = []
    for (arm, other), finding in pairs.items():
        shared = tuple(factor for factor in arm.factors if factor in other.factors)
        if len(shared) == len(arm.factors) - 1:
            one, zero = (Arm(tuple({*each.factors} - {*shared})).name for each in (arm, other))
            rows.append([f"{one} − {zero}", Arm(shared).name, *columns_of(finding)])
    titles = ["difference", "within", "paired difference (n)", "detectable", "p", "verdict"]
    return ["## One factor at a time", table(titles, rows)]


def columns_of(finding: Finding) -> list[str]:
    """A difference, what is detectable, p, and the verdict."""
    detectable = NONE if finding.detectable is None else f"{finding.detectable:.4f}"
    p = NONE
    if finding.p is not None:
        p = digits_of(finding.p) if finding.p >= 1e-4 else "< 0.0001"
    return [statistic(finding), detectable, p, finding.verdict[0]]


def digits_of(p: float) -> str:
    """Two digits of a p-value, or as many as show on which side of `ALPHA` it is."""
    rounded = (f"{p:.{digits}g}" for digits in range(2, 18))
    return next(text for text in rounded if (float(text) < ALPHA) == (p < ALPHA))


def statistic(finding: Finding, spec: str = "+.4f") -> str:
    """`1.7642 ± 0.0031 (3)`, or `1.7642 ± 0.0031 (2 of 3)†` if it does not rest on all seeds; a dash for none."""
    if finding.estimate is None:
        return NONE
    n = finding.estimate.n
    return f"{finding.estimate:{spec}} " + (f"({n})" if finding.complete else f"({n} of {finding.planned}){INCOMPLETE}")


def sweep_section(cells: Sequence[Cell], outcomes: Outcomes, optima: Mapping[Arm, Optimum]) -> list[str]:
    """A row per arm and a column per learning rate. `optima` is empty before all runs have ended."""
    lrs = sorted({cell.lr for cell in cells})
    rows = []
    for arm in dict.fromkeys(cell.arm for cell in cells):
        row = [arm.name]
        for lr in lrs:
            tried = [cell for cell in cells if (cell.arm, cell.lr) == (arm, lr)]
            bpb = final_bpb(outcomes[cell] for cell in tried if cell in outcomes)
            diverged = not bpb and any(cell in outcomes for cell in tried)
            row.append("diverged" if diverged else statistic(find([*bpb.values()], len(tried)), ".4f"))
        best = regret = NONE
        if optima:
            best = f"{optima[arm].lr:g}"
            regret = "optimum not found" if optima[arm].regret is None else f"{optima[arm].regret:.4f}"
        rows.append([*row, best, regret])
    return [
        "## Learning rates",
        "val_bpb on seeds that are not reported. An arm is reported at the vertex of a parabola through the losses "
        f"within {WINDOW:.3f} bits per byte (0.1 nats) of the lowest, of at least {POINTS} rates. The regret is what "
        "an error of the vertex is expected to cost: intervals are wider by it, and p-values count only what is "
        f"beyond. If fewer than {POINTS} rates are that close, or the vertex is not among them, no optimum is found. "
        "The arm is then reported at its best rate (if all diverged, the lowest) and has no p-value, as others may be "
        "closer to theirs. The same holds if its reported seeds end, on average, further than that from the parabola.",
        table(["arm", *(f"{lr:g}" for lr in lrs), "reported at", "regret"], rows),
    ]


def missing(planned: Collection[Any], outcomes: Mapping[Any, Outcome]) -> str:
    ended = sum(run.ended for run in outcomes.values())
    return f"{PARTIAL}{ended} of {len(planned)} runs have ended.**" if ended < len(planned) else ""


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(line)} |" for line in (titles, *rows))
    return "\n".join([first, "|---" * len(titles) + "|", *others])
