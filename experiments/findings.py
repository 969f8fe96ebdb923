"""What runs show, in numbers: differences between arms paired by seed, their tests, and trends over compute.

A difference rests on the seeds with which the runs of both arms ended and did not diverge. If these are not all
seeds, they may be the easy ones. If an arm's best learning rate was not found, the difference may be one of
tuning. Neither has a p-value.
"""

import math
from collections.abc import Sequence
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
BETTER, WORSE, AS_GOOD, UNDECIDED = "better", "worse", f"as good up to {MARGIN}", "undecided"
NO_VERDICT = "no verdict"  # of a single seed
VERDICTS = (BETTER, WORSE, AS_GOOD, UNDECIDED, NO_VERDICT)
NOT_TESTED = "not tested"  # of a slope without a p-value; the others have these words
TRENDS = {UNDECIDED: "no trend shown", BETTER: "the difference falls", WORSE: "the difference rises"}
PAIRED_BY = ("data", "tokenizer", "batch_size", "context", "eval_tokens")  # besides the seed
Pair = tuple[Arm, Arm]  # an arm, and the one that it is compared with


# --- numbers ---------------------------------------------------------------------------------------------------------


@dataclass
class Finding:
    """A mean over seeds, of losses, differences or slopes. `compare` gives it a p-value if it can be tested."""

    values: Sequence[float]  # one for each seed
    planned: int  # seeds it should rest on
    missing: Sequence[str] = ()  # why it does not rest on them, a clause for each side
    slack: float = 0.0  # what errors of learning rates may cost
    tuned: bool | None = None  # whether the optimum of every arm in it is known; None without a search
    p: float | None = None  # tests "the mean is 0", corrected for all findings of a report
    tests: int = 1  # that are corrected together
    doublings: float = 0.0  # of FLOPs, from the smallest to the largest size, of a slope over these

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
        """What is said of the first arm of a difference, or of a slope, and why nothing can be decided."""
        found, verdict, reason = self.estimate, UNDECIDED, ""
        if found is None or not self.complete:
            reason = next(iter(self.missing), "no seed is in common")
        elif found.n == 1:
            verdict, reason = NO_VERDICT, "there is a single seed"
        elif self.tuned is False:
            reason = "the best learning rate was not found, here or in the baseline"
        elif abs(found.mean) + (found.half_width or 0.0) < MARGIN and not self.doublings:
            verdict = AS_GOOD
        elif found.n < SEEDS:
            reason = "two seeds are too few to tell"
        elif self.p is not None and self.p < ALPHA:
            verdict = WORSE if found.mean > 0 else BETTER
        if self.doublings:
            verdict = NOT_TESTED if self.p is None else TRENDS[verdict]
        return verdict, reason

    @property
    def words(self) -> str:
        """The verdict. Without a search for learning rates it holds for those that were used."""
        verdict, _ = self.verdict
        decided = verdict not in (UNDECIDED, NO_VERDICT, NOT_TESTED, TRENDS[UNDECIDED])
        return f"{verdict} at this rate" if decided and self.tuned is None else verdict

    @property
    def detectable(self) -> float | None:
        """About the smallest true mean that four of five repetitions would show, if it was tested."""
        can_be_shown = self.p is not None and len(self.values) >= SEEDS
        return detectable(self.values, self.slack, self.tests) if can_be_shown else None

    @property
    def row(self) -> Row:
        """For scripts. What is not known is missing."""
        numbers = {}
        if found := self.estimate:
            numbers = {"difference": found.mean, "half_width": found.half_width, "pairs": found.n, "raw_p": self.raw_p}
        return numbers | {"p": self.p, "detectable": self.detectable, "verdict": self.words, "reason": self.verdict[1]}


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
        if not first.known:
            return (first.options.get("folder", first.folder),)
        return tuple(first.options.get(name, UNNAMED[name]) for name in PAIRED_BY)

    @property
    def lost(self) -> str:
        """Why it lacks some of its seeds: `2 of dyt's 3 runs diverged and 1 of dyt's 3 runs did not end`."""
        whose = f"{self.runs[0].arm.name}'s {len(self.runs)} runs"
        lost = {"diverged": [run.diverged for run in self.runs], "did not end": [not run.ended for run in self.runs]}
        return " and ".join(f"{sum(each)} of {whose} {what}" for what, each in lost.items() if any(each))


@dataclass
class Comparison:
    """What is found of all arms."""

    arms: dict[Arm, Group]  # empty while the search for learning rates goes on
    search: dict[Arm, list[Record]]  # its runs
    baselines: dict[Arm, Arm]  # what each arm is compared with: the first one with its size and text
    flops: dict[str, float]  # of a run of the first arm of each size, the smallest first; 0 if they are not known
    pairs: dict[Pair, Finding]
    trends: dict[Arm, Finding]  # in a ladder
    tests: int = 0  # that are corrected together

    @property
    def runs(self) -> list[Record]:
        """All that are reported."""
        return [run for group in self.arms.values() for run in group.runs]

    @property
    def seeds(self) -> str:
        """`seeds 0, 1, 2`, all that are reported."""
        return f"seeds {', '.join(map(str, sorted({run.seed for run in self.runs})))}"

    @property
    def found(self) -> dict[Arm, Finding]:
        """The difference of each arm from its baseline, the lowest first, but not in a ladder."""
        found = {arm: each for (arm, other), each in self.pairs.items() if other == self.baselines[arm]}
        if self.trends:
            return found
        return dict(sorted(found.items(), key=lambda item: item[1].estimate.mean if item[1].estimate else math.inf))

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
            return f"{names.pop()} of the same size" if self.trends else names.pop()
        known = all(run.known for run in self.runs)
        return "the first arm with the same text and batches" if known else "the first arm of its folder"


def compare(records: Sequence[Record]) -> Comparison:
    """What is found of runs whose arms `name_arms` has named: `pairs_of` arms, and `trends_of` these in a ladder.

    Holm's method corrects all p-values together. One that is missing counts as a comparison that found nothing: which
    runs diverge is chance too, so they must not make the correction of the others milder. Arms with no seed in common
    are no comparison.
    """
    search = grouped((record.arm, record) for record in records if record.search)
    reported = grouped((record.arm, record) for record in records if not record.search)
    arms = {arm: Group(runs, search.get(arm, [])) for arm, runs in reported.items()}
    order = [*dict.fromkeys(arm.without_size for arm in arms)]  # the same at all sizes
    last_first = sorted(arms, key=lambda arm: order.index(arm.without_size), reverse=True)
    first = {(arm.size, arms[arm].text): arm for arm in last_first}
    baselines = {arm: first[arm.size, group.text] for arm, group in arms.items()}
    flops = {arm.size: arms[arm].runs[0].flops or 0.0 for arm in first.values() if arm.size}
    flops = dict(sorted(flops.items(), key=lambda item: item[1]))
    pairs = {(arm, other): effect([arms[arm], arms[other]]) for arm, other in pairs_of(baselines)}
    found = Comparison(arms, search, baselines, flops, pairs, {})
    if len({*flops.values()}) > 1 and all(flops.values()):
        found.trends = trends_of(found)
    everything = [each for each in (*pairs.values(), *found.trends.values()) if each.planned]
    found.tests = len(everything)
    corrected = holm([1.0 if each.raw_p is None else each.raw_p for each in everything])
    for each, p in zip(everything, corrected, strict=True):
        each.p, each.tests = None if each.raw_p is None else p, found.tests
    return found


def effect(groups: Sequence[Group], weights: Any = (1.0, -1.0), doublings: float = 0.0) -> Finding:
    """The sum of the groups' val_bpb times these weights, for each seed: of an arm minus its baseline, or a slope."""
    planned = set.intersection(*({run.seed for run in group.runs} for group in groups))
    seeds = sorted(planned.intersection(*(group.bpb for group in groups)))
    regrets = [group.regret for group in groups]
    return Finding(
        values=(np.array(weights) @ [[group.bpb[seed] for seed in seeds] for group in groups]).tolist(),
        planned=len(planned),
        missing=[group.lost for group in groups if planned - group.bpb.keys()],
        slack=float(np.abs(weights) @ [regret or 0.0 for regret in regrets]),
        tuned=None not in regrets if any(group.search for group in groups) else None,
        doublings=doublings,
    )


def pairs_of(baselines: dict[Arm, Arm]) -> list[Pair]:
    """Each arm and its baseline. If several factors vary, also each and the one with the first value of a factor.

    In a ladder, only each arm and its baseline.
    """
    pairs = [*baselines.items()]
    first = next(iter(baselines), Arm())
    for arm, (name, value) in product(baselines, () if first.size else first.factors):
        other = Arm.of(**dict(arm.factors) | {name: value})
        if baselines.get(other) == baselines[arm]:
            pairs.append((arm, other))
    return [(arm, other) for arm, other in dict.fromkeys(pairs) if arm != other]


def trends_of(found: Comparison) -> dict[Arm, Finding]:
    """The slope of each arm's effect: val_bpb for each doubling of the baseline's FLOPs, one slope for each seed.

    Keys are arms without their size. The seeds are those that the arm and its baseline have at every size.
    """
    x = np.log2([*found.flops.values()])
    x -= x.mean()
    weights = np.kron(x / (x @ x), (1, -1))  # times losses, they give the slope of effects
    doublings = np.ptp(x)
    sized = {(arm.without_size, arm.size): group for arm, group in found.arms.items()}
    against = grouped((arm.without_size, other.without_size) for arm, other in found.baselines.items() if arm.size)
    trends = {}
    for arm, bases in against.items():
        needed = dict.fromkeys([arm, *bases])  # a size without the baseline has another
        cells = [(each, size) for size in found.flops for each in needed]
        lacking = [
            f"{size.split(',')[0]} has no run of {each.name}" for each, size in cells if (each, size) not in sized
        ]
        lacking += ["sizes have other texts or batches"] * (len({*bases}) > 1)
        if len(needed) > 1:
            untested = Finding([], 0, lacking, doublings=doublings)
            trends[arm] = untested if lacking else effect([sized[cell] for cell in cells], weights, doublings)
    return trends
