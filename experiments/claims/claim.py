"""What a claim is: a sentence with a source, protocols as data, and the rule that turns measurements into a verdict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

Scale = Literal["quick", "cpu", "gpu"]
SCALES: tuple[Scale, ...] = ("quick", "cpu", "gpu")
Verdict = Literal["confirmed", "refuted", "inconclusive at this scale"]
CONFIRMED: Verdict = "confirmed"
REFUTED: Verdict = "refuted"
OPEN: Verdict = "inconclusive at this scale"

Measured = dict[str, Any]  # JSON


@dataclass(frozen=True)
class Protocol:
    """What is run. `minutes` is the expected time on the hardware of its scale."""

    minutes: float
    flags: str = ""  # of train.py, shared by all arms
    arms: tuple[Mapping[str, str], ...] = ()  # factors, see `ablation.outcome.Arm`; the first is the baseline
    lrs: tuple[float, ...] = ()
    select_lr: bool = True  # each arm gets its best rate, selected on two other seeds; else every rate is reported
    best_variant: bool = (
        False  # of arms that differ in their norm's arguments only, the best on those seeds is reported
    )
    seeds: int = 5  # reported, paired
    settings: Mapping[str, Any] = field(default_factory=dict)  # what only this claim needs


@dataclass(frozen=True)
class Judgment:
    """A verdict, the figure that it rests on, and why."""

    verdict: Verdict
    ours: str  # the measured figure with its 95% interval and unit
    reason: str  # which part of the rule applied
    p: float | None = None  # of the claim's main comparison, corrected for the comparisons within the claim


@dataclass(frozen=True)
class Lab:
    """Where and how the runs of a claim are made. Finished runs in `folder` are reused."""

    folder: Path
    scale: Scale
    jobs: int = 1
    threads: int = 1
    devices: tuple[str, ...] = ("cpu",)  # the runs are spread over them
    cache_dir: str = ".cache"

    @property
    def device(self) -> str:
        """Where everything happens that is not a run of its own."""
        return self.devices[0]


@dataclass(frozen=True)
class Claim:
    """`rule` says in words what `judge` does. Both were written before the runs."""

    number: int
    name: str
    statement: str
    source: str
    published: str  # the published figure
    rule: str
    protocols: Mapping[Scale, Protocol]
    measure: Callable[[Protocol, Lab], Measured]
    judge: Callable[[Measured], Judgment]
    plot: Callable[[Measured], Figure]


NOT_RUN = Judgment(OPEN, "–", "not run")
