"""What runs show, in numbers: differences between arms paired by seed, their tests, and trends over compute.

A difference rests on the seeds with which the runs of both arms ended and did not diverge. If these are not all
seeds, they may be the easy ones. If an arm's best learning rate was not found, the difference may be one of
tuning. Neither has a p-value.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from experiments.rates import find_optimum, losses_of
from experiments.records import UNNAMED, Arm, Record, final_bpb, grouped
from experiments.statistics import ALPHA, Estimate, detectable, differ, estimate, holm
from runtime.run_dir import Row

MARGIN = 0.01  # a difference in val_bpb that does not matter
SEEDS = 3  # fewer call no arm better or worse
WIDE = 3  # a rung of a ladder whose interval is so many times that of the best is left out of the slope
VERDICTS = BETTER, WORSE, AS_GOOD, UNDECIDED = "better", "worse", f"as good up to {MARGIN}", "undecided"
NO_VERDICT, NO_TREND = "no verdict", "no trend shown"
AT_A_RATE = " at this rate"  # of a verdict, if learning rates were not searched for
PAIRED_BY = ("data", "tokenizer", "batch_size", "context", "eval_tokens")  # besides the seed
Pair = tuple[Arm, Arm]  # an arm, and the one that it is compared with


# --- numbers ---------------------------------------------------------------------------------------------------------


@dataclass
class Finding:
    """A mean over seeds, of losses or of differences. It has a p-value if it can be tested."""

    estimate: Estimate | None  # None if no seed is left; its p is not corrected
    planned: int  # seeds it should rest on
    tuned: bool | None = None  # whether the optimum of every arm in it is known; None without a search
    values: Sequence[float] = ()  # one for each seed
    slack: float = 0.0  # what errors of learning rates may cost
    p: float | None = None  # tests "the mean is 0", corrected for all findings of a report
    tests: int = 1  # that are corrected together

    @property
    def complete(self) -> bool:
        return self.estimate is not None and self.estimate.n == self.planned

    @property
    def verdict(self) -> tuple[str, str]:
        """One of `VERDICTS` on the first arm of a difference, and why nothing can be decided."""
        found = self.estimate
        if found is None or not self.complete:
            ended = "runs diverged or have not ended, here or in the baseline"
            return UNDECIDED, ended if self.planned else "no seed is in common"
        if found.n == 1:
            return NO_VERDICT, "a single seed"
        if self.tuned is False:
            return UNDECIDED, "the best learning rate was not found, here or in the baseline"
        if max(-found.low, found.high) < MARGIN:
            return AS_GOOD, ""
        if self.p is None or self.p >= ALPHA:
            return UNDECIDED, ""
        if found.n < SEEDS:
            return UNDECIDED, "two seeds are too few to tell"
        return WORSE if found.mean > 0 else BETTER, ""

    @property
    def shown(self) -> bool:
        """Whether the test finds a difference."""
        return self.verdict[0] in (BETTER, WORSE)

    @property
    def words(self) -> str:
        """The verdict. Without a search for learning rates it holds for those that were used."""
        verdict, _ = self.verdict
        decided = verdict not in (UNDECIDED, NO_VERDICT, NO_TREND)
        return verdict + AT_A_RATE if decided and self.tuned is None else verdict

    @property
    def detectable(self) -> float | None:
        can_be_shown = self.p is not None and len(self.values) >= SEEDS
        return detectable(self.values, self.slack, self.tests) if can_be_shown else None

    @property
    def row(self) -> Row:
        """For scripts. What is not known is missing."""
        found, numbers = self.estimate, {}
        if found:
            numbers = {"difference": found.mean, "half_width": found.half_width, "pairs": found.n}
            numbers |= {"raw_p": found.p if self.p is not None else None}
        return numbers | {"p": self.p, "detectable": self.detectable, "verdict": self.words, "reason": self.verdict[1]}


@dataclass
class Trend(Finding):
    """The mean slope of an effect over compute."""

    ends: Sequence[float] = ()  # the effect at the smallest and at the largest size, on the line
    rungs: Mapping[str, Finding] = field(default_factory=dict)  # the effect at each size
    left_out: Sequence[str] = ()  # sizes whose effect is too imprecise for the slope
    doublings: float = 0.0  # of FLOPs, between the ends

    @property
    def verdict(self) -> tuple[str, str]:
        if len(self.rungs) - len(self.left_out) < 2:
            return NO_TREND, "fewer than two sizes are precise"
        if self.p is None or self.p >= ALPHA or len(self.values) < SEEDS:
            return NO_TREND, super().verdict[1]
        rungs = [*self.rungs.values()]
        shown = rungs[0].verdict[0], rungs[-1].verdict[0]
        if {*shown} == {BETTER, WORSE}:
            return f"{shown[0]} turns into {shown[1]}", ""
        first, last = self.ends
        if first * last < 0:
            return "the difference falls" if last < first else "the difference rises", ""
        return "the gap grows" if abs(last) > abs(first) else "the gap closes", ""


def find(values: Sequence[float], planned: int, slack: float = 0.0, tuned: bool | None = None) -> Finding:
    """The finding of these values. Its p is not corrected yet."""
    measured = estimate(values, slack) if values else None
    p = measured.p if measured and measured.n == planned and tuned is not False else None
    return Finding(measured, planned, tuned, values, slack, p)


@dataclass
class Group:
    """The runs of an arm, and those that searched for its learning rate."""

    runs: list[Record]
    search: list[Record]

    @cached_property
    def bpb(self) -> dict[int, float]:
        return final_bpb(self.runs)

    @cached_property
    def regret(self) -> float | None:
        """What an error of its learning rate is expected to cost. None if the best was not found, or not searched."""
        losses = losses_of(self.search)
        return find_optimum(losses).regret_at(self.runs[0].lr, self.bpb.values()) if losses else None

    @property
    def text(self) -> tuple[str, ...]:
        """What runs must share besides the seed to be paired. Where that is not known, the folder."""
        first = self.runs[0]
        return tuple(first.options.get(name, UNNAMED[name]) for name in PAIRED_BY) if first.known else (first.folder,)


@dataclass
class Comparison:
    """What is found of all arms."""

    arms: dict[Arm, Group]  # empty while the search for learning rates goes on
    search: dict[Arm, list[Record]]  # its runs
    baselines: dict[Arm, Arm]  # what each arm is compared with: the first one with its size and text
    flops: dict[str, float]  # of a run of the first arm of each size, the smallest first; 0 if they are not known
    pairs: dict[Pair, Finding]
    trends: dict[Arm, Trend]  # in a ladder

    @property
    def runs(self) -> list[Record]:
        """All that are reported."""
        return [run for group in self.arms.values() for run in group.runs]

    @property
    def found(self) -> dict[Arm, Finding]:
        """The difference of each arm from its baseline, the lowest first, but not in a ladder."""
        found = {arm: each for (arm, other), each in self.pairs.items() if other == self.baselines[arm]}
        means = {arm: each.estimate.mean if each.estimate else math.inf for arm, each in found.items()}
        return found if self.trends else {arm: found[arm] for arm in sorted(found, key=means.__getitem__)}

    @property
    def tuned(self) -> bool:
        return bool(self.arms) and all(group.search for group in self.arms.values())

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
            return compared.pop().name
        if len(names) == 1:
            return f"{names.pop()} of the same size"
        known = all(run.known for run in self.runs)
        return "the first arm with the same text and batches" if known else "the first arm of its folder"


def compare(records: Iterable[Record]) -> Comparison:
    """What is found of runs whose arms `name_arms` has named."""
    runs = grouped(((record.search, record.arm), record) for record in records)
    search = {arm: each for (searched, arm), each in runs.items() if searched}
    arms = {arm: Group(each, search.get(arm, [])) for (searched, arm), each in runs.items() if not searched}
    return compare_groups(arms, search)


def compare_groups(arms: dict[Arm, Group], search: dict[Arm, list[Record]]) -> Comparison:
    """The differences of `pairs_of` the arms, and `trends_of` these in a ladder.

    Holm's method corrects all p-values together. One that is missing counts as a comparison that found nothing: which
    runs diverge is chance too, so they must not make the correction of the others milder. Arms with no seed in common
    are no comparison.
    """
    first: dict[Any, Arm] = {}
    baselines = {arm: first.setdefault((arm.size, group.text), arm) for arm, group in arms.items()}
    flops = {arm.size: arms[arm].runs[0].flops or 0.0 for arm in first.values()}
    flops = dict(sorted(flops.items(), key=lambda item: item[1]))
    pairs = {(arm, other): difference(arms[arm], arms[other]) for arm, other in pairs_of(baselines)}
    trends = trends_of(pairs, flops) if "" not in flops and all(flops.values()) else {}
    everything = [each for each in (*pairs.values(), *trends.values()) if each.planned]
    corrected = holm([1.0 if each.p is None else each.p for each in everything])
    for each, p in zip(everything, corrected, strict=True):
        each.p, each.tests = None if each.p is None else p, len(everything)
    return Comparison(arms, search, baselines, flops, pairs, trends)


def difference(one: Group, other: Group) -> Finding:
    """The first arm minus the other, for each seed."""
    seeds = sorted(one.bpb.keys() & other.bpb.keys())
    planned = {run.seed for run in one.runs} & {run.seed for run in other.runs}
    regrets = one.regret, other.regret
    slack, tuned = sum(regret or 0.0 for regret in regrets), None
    if one.search or other.search:
        tuned = None not in regrets
    return find([one.bpb[seed] - other.bpb[seed] for seed in seeds], len(planned), slack, tuned)


def pairs_of(baselines: Mapping[Arm, Arm]) -> list[Pair]:
    """Each arm and its baseline. If several factors vary, also each and the one with the first value of a factor.

    In a ladder, only each arm and its baseline.
    """
    pairs = [*baselines.items()]
    first = next(iter(baselines), Arm())
    for arm, (index, level) in product(baselines, enumerate(first.factors if not first.size else ())):
        other = Arm((*arm.factors[:index], level, *arm.factors[index + 1 :]))
        if baselines.get(other) == baselines[arm]:
            pairs.append((arm, other))
    return [(arm, other) for arm, other in dict.fromkeys(pairs) if arm != other]


def trends_of(found: Mapping[Pair, Finding], flops: Mapping[str, float]) -> dict[Arm, Trend]:
    """The slope of each arm's effect: val_bpb for each doubling of the baseline's FLOPs, one slope for each seed.

    Keys are arms without their size. `flops` are those of each size. There is a slope only if the effect is known at
    every size. Those where it is `imprecise` do not count.
    """
    trends: dict[Arm, Trend] = {}
    for plain, pairs in grouped((arm.without_size, (arm.size, each)) for (arm, _), each in found.items()).items():
        rungs: dict[str, Finding] = dict(sorted(pairs, key=lambda pair: flops[pair[0]]))
        left_out = imprecise(rungs)
        kept = {size: each for size, each in rungs.items() if size not in left_out}
        x = np.log2([flops[size] for size in kept])
        line = np.linalg.pinv(np.vander(x - x.mean(), 2))  # times effects, it gives the slope and the middle
        known = len(kept) > 1 and len(rungs) == len(flops) and all(each.complete for each in rungs.values())
        slopes, middles = line @ [each.values for each in kept.values()] if known else np.empty((2, 0))
        slack, tuned = abs(line[0]) @ [each.slack for each in kept.values()], {each.tuned for each in kept.values()}
        planned = min(each.planned for each in kept.values())
        slope = find(slopes.tolist(), planned, float(slack), False if False in tuned else all(tuned) or None)
        ends = np.array([x.min(), x.max()]) - x.mean()
        effects = (middles.mean() + slopes.mean() * ends).tolist() if known else []
        trends[plain] = Trend(**vars(slope), ends=effects, rungs=rungs, left_out=left_out, doublings=float(np.ptp(x)))
    return trends


def imprecise(rungs: Mapping[str, Finding]) -> list[str]:
    """The sizes whose interval is more than `WIDE` times that of the best, and not by chance."""
    widths = {size: each.estimate.half_width or 0.0 for size, each in rungs.items() if each.estimate}
    best = min(widths.values(), default=0.0)
    wide = [size for size, width in widths.items() if width > WIDE * best]
    return [size for size in wide if differ(widths[size], best, rungs[size].planned)]
