"""What a claim is: what is measured at each scale, and what would count as reproducing a published sentence.

All of it is written down, and committed, before the runs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from files import digest

Row = dict[str, Any]  # JSON: {"arm": "RMSNorm", "seed": 0, "value": 1.4}, and more of a run of train.py
Measured = dict[str, Any]  # JSON: {"runs": reported rows, ...}
ANYTHING = (-math.inf, math.inf)


@dataclass(frozen=True)
class Arm:
    """Runs of train.py at one of: the best rate, searched for around `lr`; that of the arm `like`; or all of `lrs`.

    `data` is `python`, `shakespeare`, or a number of bytes of `python`'s training text.
    """

    factors: Mapping[str, str]  # options of train.py: {"norm": "dyt:alpha=0.5", "optimizer": "muon"}
    lr: float | None = None
    like: str = ""
    lrs: tuple[float, ...] = ()
    data: str = "python"


@dataclass(frozen=True)
class Protocol:
    """What is measured at a scale: every arm with each of `seeds` seeds, which all arms share."""

    seeds: int
    flags: str = ""  # of train.py, shared by all arms
    arms: Mapping[str, Arm] = field(default_factory=dict)
    depths: tuple[int, ...] = ()  # of models at initialization


@dataclass(frozen=True)
class Effect:
    """A sum of arms' values times these coefficients, for each seed, and what is expected of its mean.

    If the 95% interval lies inside `reproduced`, the claim is reproduced. If it does not overlap `expected`, the effect
    that was set before (by default `reproduced`), it is not. An effect without these is shown and not judged.
    """

    name: str
    terms: Mapping[str, float]
    reproduced: tuple[float, float] = ANYTHING
    expected: tuple[float, float] = ANYTHING
    value: str = "value"  # of the arms: a name in `judge.DERIVED`
    ratio: bool = False  # values are logarithms: the effect is shown as a ratio
    x: float | None = None  # where it stands in the plot of the trend

    def __post_init__(self) -> None:
        if self.expected == ANYTHING:
            object.__setattr__(self, "expected", self.reproduced)

    @property
    def judged(self) -> bool:
        return self.reproduced != ANYTHING

    def scaled(self, *values: float) -> list[float]:
        """Values of the effect as they are shown."""
        return [math.exp(value) if self.ratio else value for value in values]


def difference(arm: str, baseline: str, ratio: bool = False, **more: Any) -> Effect:
    return Effect(f"{arm} {'/' if ratio else '−'} {baseline}", {arm: 1, baseline: -1}, ratio=ratio, **more)


def slope(name: str, arms: Mapping[float, Mapping[str, float]], **more: Any) -> Effect:
    """The least-squares slope over x of sums of arms' values: {x: {arm: coefficient}}."""
    *_, total = accumulate(arms)  # Python 3.12's sum() rounds otherwise, and the hash of the claim would change
    center = total / len(arms)
    *_, spread = accumulate((x - center) ** 2 for x in arms)
    terms = {arm: (x - center) / spread * sign for x, group in arms.items() for arm, sign in group.items()}
    return Effect(name, terms, **more)


@dataclass(frozen=True)
class Claim:
    """The verdict rests on the judged effects at the first scale. If there are several, all must hold."""

    name: str  # `page.md` has its title, the quoted sentence, and the question that is asked
    effects: Sequence[Effect]
    protocols: Mapping[str, Protocol]  # by scale
    measure: Callable[..., Measured] | None = None  # at scales that train nothing
    dashed: float | None = None  # the published effect, in the plot of the trend
    over: str = ""  # what x is in that plot, if it does not show the primary effect at each scale
    across: str = ""  # what y is, if the name of the effect does not say it
    exact: bool = False  # an identity

    def hash(self, scale: str) -> str:
        """Of what was written down before the runs at a scale: what is judged, and the protocol."""
        judged = [asdict(each) for each in self.effects if each.judged]
        return digest([self.name, judged, asdict(self.protocols[scale])])[:12]
