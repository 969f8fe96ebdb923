"""What a study is: what is measured at each scale, and what would count as reproducing a published sentence.

All of it is written down, and committed, before the runs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from experiments.ablation.outcome import grouped
from files import digest

Row = dict[str, Any]  # JSON: {"arm": "RMSNorm", "seed": 0, "value": 1.4}, and more of a run of train.py
Measured = dict[str, Any]  # JSON: {"runs": reported rows, ...}
Values = dict[str, float]  # by arm, of one seed
Region = tuple[float, float]
BELOW, ABOVE = (-math.inf, 0.0), (0.0, math.inf)


@dataclass(frozen=True)
class Runs:
    """An arm of an ablation at one of: its best rate, searched for around `lr`; that of the arm `like`; all of `lrs`.

    `data` is `python`, `shakespeare`, or a number of bytes of `python`'s training text.
    """

    factors: Mapping[str, str]  # its options: {"norm": "dyt:alpha=0.5", "optimizer": "muon"}
    lr: float | None = None
    like: str = ""
    lrs: tuple[float, ...] = ()
    data: str = "python"


@dataclass(frozen=True)
class Protocol:
    """What is measured at a scale: every arm with each of `seeds` seeds, which all arms share."""

    seeds: int
    flags: str = ""  # train.py's flags for all arms
    arms: Mapping[str, Runs] = field(default_factory=dict)  # by the names that effects and results use
    depths: tuple[int, ...] = ()  # numbers of blocks of models at initialization


@dataclass(frozen=True)
class Effect:
    """A sum of arms' values times these coefficients, for each seed, and what is expected of its mean.

    If the 95% interval lies inside `reproduced`, the sentence is reproduced. If it does not overlap `expected`, the
    effect that was set before (by default `reproduced`), it is not. An effect without these is shown and not judged.
    """

    name: str
    terms: Mapping[str, float]
    reproduced: Region | None = None
    expected: Region | None = None
    value: str = "value"  # an arm's value: its lowest last loss, or a name in `Study.values`
    ratio: bool = False  # values are logarithms: the effect is shown as a ratio

    def __post_init__(self) -> None:
        if self.expected is None:
            object.__setattr__(self, "expected", self.reproduced)


def difference(arm: str, baseline: str, ratio: bool = False, **more: Any) -> Effect:
    return Effect(f"{arm} {'/' if ratio else '−'} {baseline}", {arm: 1, baseline: -1}, ratio=ratio, **more)


def slope(name: str, arms: Mapping[float, Mapping[str, float]], **more: Any) -> Effect:
    """The least-squares slope over x of sums of arms' values: {x: {arm: coefficient}}."""
    *_, total = accumulate(arms)  # Python 3.12's sum() rounds otherwise, and the hash of the study would change
    center = total / len(arms)
    *_, spread = accumulate((x - center) ** 2 for x in arms)
    terms = {arm: (x - center) / spread * sign for x, group in arms.items() for arm, sign in group.items()}
    return Effect(name, terms, **more)


@dataclass(frozen=True)
class Study:
    """The verdict rests on the judged effects at the first scale. If there are several, all must hold."""

    name: str
    effects: Sequence[Effect]
    protocols: Mapping[str, Protocol]  # by scale
    measure: Callable[[Protocol, range], list[Row]] | None = None  # where a protocol has no arms
    values: Mapping[str, Callable[[list[Row], Measured], Values]] = field(default_factory=dict)  # from one seed's rows
    unit: str = "nats"  # the unit of the first effect, and of the others in the figure, which have the same value
    exact: bool = False  # an identity

    def hash(self, scale: str, rules: str = "") -> str:
        """Of what was written down before the runs: the rules of the corpus, what is judged, and the protocol.

        Runs without a corpus have no rules. Those at b246c92 and before have none either: theirs are the rules of that
        commit, and the hash is the digest of [name, judged effects, protocol], in which effects had an x.
        """
        judged = [asdict(each) | {"x": None} for each in self.effects if each.reproduced]
        return digest([*filter(None, [rules]), self.name, judged, asdict(self.protocols[scale])])[:12]


def losses(rows: Sequence[Row], name: str = "value") -> dict[str, list[float]]:
    """By arm, at each of its rates. They are infinite for runs that diverged."""
    return grouped((row["arm"], math.inf if row[name] is None else row[name]) for row in rows)


def lowest(rows: Sequence[Row], measured: Measured, name: str = "value") -> Values:
    return {arm: min(group) for arm, group in losses(rows, name).items()}
