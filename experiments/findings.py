"""What runs show, in numbers: differences between arms paired by seed, their tests, and trends over compute.

A difference rests on the seeds with which the runs of both arms ended and did not diverge. If these are not all
seeds, they may be the easy ones. If an arm's best learning rate was not found, the difference may be one of
tuning. Neither has a p-value.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from experiments.rates import find_optimum, losses_of
from experiments.records import UNNAMED, Arm, Record, final_bpb, grouped
from experiments.statistics import ALPHA, Estimate, detectable, estimate_mean, holm
from runtime.run_dir import Row

MARGIN = 0.01  # a difference in val_bpb that does not matter
SEEDS = 3  # fewer call no arm better or worse
VERDICTS = BETTER, WORSE, AS_GOOD, UNDECIDED = "better", "worse", f"as good up to {MARGIN}", "undecided"
NO_VERDICT = "no verdict"  # of a single seed
NO_TREND, FALLS, RISES = "no trend shown", "the difference falls", "the difference rises"
AT_A_RATE = " at this rate"  # of a verdict, if learning rates were not searched for
PAIRED_BY = ("data", "tokenizer", "batch_size", "context", "eval_tokens")  # besides the seed
Pair = tuple[Arm, Arm]  # an arm, and the one that it is compared with


# --- numbers ---------------------------------------------------------------------------------------------------------


@dataclass
class Finding:
    """A mean over seeds, of losses or of differences. `correct` gives it a p-value if it can be tested."""

    values: Sequence[float]  # one for each seed
    planned: int  # seeds it should rest on
    slack: float = 0.0  # what errors of learning rates may cost
    tuned: bool | None = None  # whether the optimum of every arm in it is known; None without a search
    p: float | None = None  # tests "the mean is 0", corrected for all findings of a report
    tests: int = 1  # that are corrected together

    @cached_property
    def estimate(self) -> Estimate | None:
        """None if no seed is left. Its p is not corrected."""
        return estimate_mean(self.values, self.slack) if self.values else None

    @property
    def complete(self) -> bool:
        """Whether it rests on all seeds."""
        return 0 < len(self.values) == self.planned

    @property
    def raw_p(self) -> float | None:
        """The p-value before the correction, if it can be tested."""
        return self.estimate.p if self.estimate and self.complete and self.tuned is not False else None

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
    def words(self) -> str:
        """The verdict. Without a search for learning rates it holds for those that were used."""
        verdict, _ = self.verdict
        decided = verdict not in (UNDECIDED, NO_VERDICT, NO_TREND)
        return verdict + AT_A_RATE if decided and self.tuned is None else verdict

    @property
    def detectable(self) -> float | None:
        """About the smallest true mean that four of five repetitions would show, if it was tested."""
        can_be_shown = self.p is not None and len(self.values) >= SEEDS
        return detectable(self.values, self.slack, self.tests) if can_be_shown else None

    @property
    def row(self) -> Row:
        """For scripts. What is not known is missing."""
        found, numbers = self.estimate, {}
        if found:
            numbers = {"difference": found.mean, "half_width": found.half_width, "pairs": found.n, "raw_p": self.raw_p}
        return numbers | {"p": self.p, "detectable": self.detectable, "verdict": self.words, "reason": self.verdict[1]}


@dataclass
class Trend(Finding):
    """The mean slope of an effect over compute."""

    doublings: float = 0.0  # of FLOPs, from the smallest to the largest size

    @property
    def verdict(self) -> tuple[str, str]:
        found = self.estimate
        if found is None or self.p is None or self.p >= ALPHA or found.n < SEEDS:
            return NO_TREND, super().verdict[1]
        return RISES if found.mean > 0 else FALLS, ""


# --- arms ------------------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """The reported runs of an arm, and those that searched for its learning rate."""

    runs: list[Record]
    search: list[Record]

    @cached_property
    def bpb(self) -> dict[int, float]:
        """Final val_bpb by seed."""
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
        folder = first.options.get("folder", first.folder)
        return tuple(first.options.get(name, UNNAMED[name]) for name in PAIRED_BY) if first.known else (folder,)


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
        """Whether the best learning rate of every arm was searched for and found."""
        return bool(self.arms) and all(group.regret is not None for group in self.arms.values())

    @property
    def ordered(self) -> list[Arm]:
        """Each baseline, and then the arms that are compared with it."""
        bases = dict.fromkeys(self.baselines.values())
        return [arm for base in bases for arm in (base, *self.found) if self.baselines[arm] == base]

    @property
    def against(self) -> str:
        """What arms are compared with."""
        names = {self.baselines[arm].without_size.name for arm in self.found}
        if len(names) == 1:
            return names.pop() + (" of the same size" if self.trends else "")
        known = all(run.known for run in self.runs)
        return "the first arm with the same text and batches" if known else "the first arm of its folder"


def compare(records: Iterable[Record]) -> Comparison:
    """What is found of runs whose arms `name_arms` has named: `pairs_of` arms, and `trends_of` these in a ladder.

    Holm's method corrects all p-values together. One that is missing counts as a comparison that found nothing: which
    runs diverge is chance too, so they must not make the correction of the others milder. Arms with no seed in common
    are no comparison.
    """
    runs = grouped(((record.search, record.arm), record) for record in records)
    search = {arm: each for (searched, arm), each in runs.items() if searched}
    arms = {arm: Group(each, search.get(arm, [])) for (searched, arm), each in runs.items() if not searched}
    first: dict[Any, Arm] = {}
    baselines = {arm: first.setdefault((arm.size, group.text), arm) for arm, group in arms.items()}
    flops = {arm.size: arms[arm].runs[0].flops or 0.0 for arm in first.values() if arm.size}
    flops = dict(sorted(flops.items(), key=lambda item: item[1]))
    pairs = {(arm, other): difference(arms[arm], arms[other]) for arm, other in pairs_of(baselines)}
    trends = trends_of(pairs, flops) if len(flops) > 1 and all(flops.values()) else {}
    everything = [each for each in (*pairs.values(), *trends.values()) if each.planned]
    corrected = holm([1.0 if each.raw_p is None else each.raw_p for each in everything])
    for each, p in zip(everything, corrected, strict=True):
        each.p, each.tests = None if each.raw_p is None else p, len(everything)
    return Comparison(arms, search, baselines, flops, pairs, trends)


def difference(one: Group, other: Group) -> Finding:
    """The first arm minus the other, for each seed."""
    seeds = sorted(one.bpb.keys() & other.bpb.keys())
    planned = {run.seed for run in one.runs} & {run.seed for run in other.runs}
    regrets = one.regret, other.regret
    return Finding(
        values=[one.bpb[seed] - other.bpb[seed] for seed in seeds],
        planned=len(planned),
        slack=sum(regret or 0.0 for regret in regrets),
        tuned=None not in regrets if one.search or other.search else None,
    )


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
    every size, with as many seeds.
    """
    x = np.log2([*flops.values()])
    line, _ = np.linalg.pinv(np.vander(x - x.mean(), 2))  # times effects, it gives their slope
    trends = {}
    named = [((a.without_size, b.without_size), (a.size, each)) for (a, b), each in found.items() if a.size]
    for (arm, _), effects in grouped(named).items():  # a size may have another baseline
        sizes = dict(effects)
        rungs = [sizes[size] for size in flops if size in sizes]
        planned = min(each.planned for each in rungs)
        tuned = {each.tuned for each in rungs}
        known = len(rungs) == len(flops) and all(each.complete and each.planned == planned for each in rungs)
        trends[arm] = Trend(
            values=(line @ [each.values for each in rungs]).tolist() if known else [],
            planned=planned,
            slack=float(abs(line) @ [each.slack for each in rungs]) if known else 0.0,
            tuned=False if False in tuned else None if None in tuned else True,
            doublings=float(np.ptp(x)),
        )
    return trends
