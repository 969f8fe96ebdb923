"""What a study is: what is measured at each scale, and what would count as reproducing a published sentence.

All of it is written down and committed before the runs. Scale S has 0.23 million parameters and sees 1.02
million tokens, M has 0.84 and sees 2.05 million. Tokens are bytes, so losses are in nats per byte. Most studies
are judged with Muon: between seeds, its losses vary less than AdamW's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

from experiments.ablation.outcome import grouped
from files import digest

Row = dict[str, Any]  # JSON: {"arm": "RMSNorm", "seed": 0, "value": 1.4}, and more about a run of train.py
Measured = dict[str, Any]  # JSON: {"runs": reported rows, ...}
Values = dict[str, float]  # values of one seed, by arm
Region = tuple[float, float]
ABOVE = (0.0, math.inf)

TINY = (
    "--tokenizer bytes --layers 4 --heads 2 --batch-size 8 --dtype float32 --no-compile --schedule linear --steps 1000 "
    "--eval-every 1000 --eval-tokens 131072 --save-every 1000 --keep 1"
)
S = f"{TINY} --dim 64 --context 128"
M = f"{TINY} --dim 128 --context 256"
# The scale "gpu" runs only if asked for: 14 million parameters, 65 million tokens of 8,192 kinds.
GPU = "--preset small --dropout 0 --dtype bfloat16 --compile --steps 2000 --eval-every 2000 --save-every 2000 --keep 1"


@dataclass(frozen=True)
class Runs:
    """An arm of an ablation at its best rate, searched for around `lr`, or at that of the arm `like`, or at all `lrs`.

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
    arms: Mapping[str, Runs] = field(default_factory=dict)  # named as in effects and results
    depths: tuple[int, ...] = ()  # numbers of blocks of models at initialization


@dataclass(frozen=True)
class Effect:
    """A sum of arms' values times these coefficients, for each seed, and what is expected of its mean.

    If the 95% interval lies inside `reproduced`, the sentence is reproduced. If it does not overlap `expected`, the
    effect that was set before (by default `reproduced`), it is not. An effect without these is not judged.
    """

    name: str
    terms: Mapping[str, float]
    reproduced: Region | None = None
    expected: Region | None = None
    value: str = "value"  # an arm's value: its lowest last loss, or a name in `Study.values`
    ratio: bool = False  # values are logarithms, printed as a ratio

    def __post_init__(self) -> None:
        if self.expected is None:
            object.__setattr__(self, "expected", self.reproduced)


def difference(arm: str, baseline: str, ratio: bool = False, **more: Any) -> Effect:
    return Effect(f"{arm} {'/' if ratio else '−'} {baseline}", {arm: 1, baseline: -1}, ratio=ratio, **more)


def slope(name: str, arms: Mapping[int, Mapping[str, float]], **more: Any) -> Effect:
    """The least-squares slope over ln(x) of sums of arms' values: {x: {arm: coefficient}}."""
    x = {number: math.log(number) for number in arms}
    *_, total = accumulate(x.values())  # Python 3.12's sum() rounds otherwise, and the hash of the study would change
    center = total / len(x)
    *_, spread = accumulate((value - center) ** 2 for value in x.values())
    weights = {number: (value - center) / spread for number, value in x.items()}
    terms = {arm: weights[number] * sign for number, group in arms.items() for arm, sign in group.items()}
    return Effect(name, terms, **more)


@dataclass(frozen=True)
class Study:
    """The verdict rests on the judged effects at the first scale. If there are several, all must hold."""

    name: str
    effects: Sequence[Effect]
    protocols: Mapping[str, Protocol]  # keys are scales
    measure: Callable[[Protocol, int], Values] | None = None  # takes a seed, where a protocol has no arms
    values: Mapping[str, Callable[[list[Row], Measured], Values]] = field(
        default_factory=dict
    )  # from the rows of one seed
    unit: str = "nats"  # the unit of the effects in the figure
    exact: bool = False  # an identity

    @property
    def scales(self) -> Mapping[str, Protocol]:
        """And for trained ones the scale "gpu", with the arms and seeds of the first scale."""
        first = next(iter(self.protocols.values()))
        return {**self.protocols, "gpu": replace(first, flags=GPU)} if first.arms else self.protocols

    def hash(self, scale: str, rules: str = "") -> str:
        """Of what was written down before the runs: the rules of the corpus, what is judged, and the protocol.

        What needs no corpus has no rules. Results of b246c92 and before name none: the rules of their corpus are those
        of that commit, and their hash is the digest of the JSON [name, judged effects, protocol]. Effects had an x.
        """
        judged = [asdict(each) | {"x": None} for each in self.effects if each.reproduced]
        return digest([*filter(None, [rules]), self.name, judged, asdict(self.scales[scale])])[:12]


def losses(rows: Sequence[Row], name: str = "value") -> dict[str, list[float]]:
    """By arm, at each of its rates. They are infinite for runs that diverged."""
    return grouped((row["arm"], math.inf if row[name] is None else row[name]) for row in rows)


def lowest(rows: Sequence[Row], measured: Measured, name: str = "value") -> Values:
    return {arm: min(group) for arm, group in losses(rows, name).items()}
