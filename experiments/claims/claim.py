"""What a claim is: a statement with a source, what to measure at each scale, and what the claim expects of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from experiments.claims.measure import Lab, Measured, Protocol, train_grid

Scale = Literal["quick", "cpu", "gpu"]
SCALES: tuple[Scale, ...] = ("quick", "cpu", "gpu")
Verdict = Literal["confirmed", "refuted", "inconclusive at this scale"]
OPEN: Verdict = "inconclusive at this scale"


@dataclass(frozen=True)
class Comparison:
    """What a claim expects of a sum of arms' values, averaged over seeds. Differences are {"a": 1, "b": -1}.

    `value` is a column of the runs, or a name in `judge.DERIVED`. Losses are in nats per token. Values whose names
    begin with log_ are logarithms, which are reported as ratios.
    """

    terms: Mapping[str, float]  # coefficients by arm
    expected: Literal["above", "below", "within", "anything"]  # within: ± the bound; anything: shown, not judged
    bound: float = 0.0
    value: str = "val_loss"
    negligible: float = 0.0  # above and below: also refuted if shown to be within ± this of the bound

    @property
    def name(self) -> str:
        """`rmsnorm − layernorm`."""
        signed = [
            f"{'+' if factor > 0 else '−'} {'' if abs(factor) == 1 else f'{abs(factor):g} '}{arm}"
            for arm, factor in self.terms.items()
        ]
        value = "" if self.value == "val_loss" else f" ({self.value.replace('_', ' ')})"
        return " ".join(signed).removeprefix("+ ") + value

    @property
    def statement(self) -> str:
        """`rmsnorm − layernorm within ±0.02`."""
        if self.expected == "anything":
            return self.name
        text = f"{self.name} {self.expected} {'±' if self.expected == 'within' else ''}{self.bound:g}"
        return f"{text} and not within ±{self.negligible:.3g} of it" if self.negligible else text


@dataclass(frozen=True)
class Claim:
    """`rule` says what is compared, `comparisons` what is expected of it. Both are written before the runs."""

    name: str
    statement: str
    source: str
    published: str  # the published figure
    rule: str
    protocols: Mapping[Scale, Protocol]
    comparisons: tuple[Comparison, ...]
    measure: Callable[[Protocol, Lab], Measured] = train_grid
    must_learn: tuple[str, ...] = ()  # arms of which most runs must learn more than the frequencies of the tokens


@dataclass(frozen=True)
class Judgment:
    """A verdict, the figures that it rests on with their 95% intervals, and why."""

    verdict: Verdict
    ours: str
    reason: str
    p: float | None = None  # of the deciding comparison, corrected for all comparisons of the claim
