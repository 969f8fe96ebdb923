"""Claim 6. DeepNorm's details matter: where α goes, and the sign of the exponent of its gain."""

import math
from collections.abc import Callable
from dataclasses import replace

from matplotlib.figure import Figure
from torch import Tensor

from experiments.claims.claim import Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.initial import initial_model, random_batch, with_placements
from experiments.claims.runs import geometric, ratio
from experiments.claims.verdict import Comparison, all_of
from experiments.probe import probe
from norms.placement import PLACEMENTS
from norms.placement.one_stream import DeepNorm, deepnorm_gain


class AlphaOnBranch(DeepNorm):
    """N(x + α f(x)): wrong, α belongs to x."""

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return self.norm(x + self.alpha * f(x, *args))


def inverted_gain(role: str, depth: int) -> float:
    """(8L)^+¼: wrong, the exponent is negative."""
    return 1 / deepnorm_gain(role, depth)


WRONG = {
    "α on the branch": replace(PLACEMENTS["deepnorm"], residual=AlphaOnBranch),
    "inverted gain": replace(PLACEMENTS["deepnorm"], init_gain=inverted_gain),
}
FAR = math.log(10)


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """The gradient norm of each block, from the first, at initialization in float64."""
    rows = []
    with with_placements(WRONG):
        for seed in range(protocol.seeds):
            for arm in protocol.arms:
                model = initial_model(protocol, arm, seed).double()
                blocks = probe(model, *random_batch(model, protocol.settings["rows"], seed))[1:]
                rows.append({"arm": arm["placement"], "seed": seed, "gradients": [block.grad_norm for block in blocks]})
    return {"rows": rows}


def gradient_ratios(measured: Measured, arm: str) -> list[float]:
    """Gradient norm of the first block over that of the last, by seed."""
    return [row["gradients"][0] / row["gradients"][-1] for row in measured["rows"] if row["arm"] == arm]


def imbalance(measured: Measured, arm: str) -> list[float]:
    """How far the ratio is from 1, in either direction: |log ratio|, by seed."""
    return [abs(math.log(value)) for value in gradient_ratios(measured, arm)]


def judge(measured: Measured) -> Judgment:
    right = imbalance(measured, "deepnorm")
    comparisons = [Comparison("DeepNorm balances gradients", right, "below", FAR)]
    for arm in WRONG:
        excess = [wrong - seed_right for wrong, seed_right in zip(imbalance(measured, arm), right, strict=True)]
        comparisons.append(Comparison(f"{arm} unbalances gradients", excess, "above", FAR))
    found = {arm: ratio(geometric(gradient_ratios(measured, arm))) for arm in ("deepnorm", *WRONG)}
    ours = "; ".join(f"{arm} {text}" for arm, text in found.items())
    return all_of(comparisons, f"gradient of the first block over that of the last: {ours}")


def plot(measured: Measured) -> Figure:
    """Gradient norm over depth, relative to the last block's: everything, and what is near 1. A line per seed."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    everything, near = figure.subplots(1, 2)
    for axes in (everything, near):
        for number, arm in enumerate(("deepnorm", *WRONG)):
            for row in measured["rows"]:
                if row["arm"] == arm:
                    gradients = [value / row["gradients"][-1] for value in row["gradients"]]
                    label = arm if row["seed"] == 0 else None
                    axes.plot(range(1, len(gradients) + 1), gradients, color=f"C{number}", linewidth=1, label=label)
        axes.set(xlabel="block", ylabel="gradient norm / that of the last block")
        axes.grid(alpha=0.3)
    everything.set_yscale("log")
    everything.legend()
    near.set_ylim(0.5, 2)
    return figure


CLAIM = Claim(
    number=6,
    name="deepnorm-details",
    statement="DeepNorm's details matter for the gradients at initialization: α on the branch instead of the residual "
    "stream, or a gain with the inverted exponent, unbalances them over depth",
    source="DeepNet, arXiv 2203.00555; wrong variants from public implementations",
    published="none found",
    rule="Gradient norm of the first block over that of the last, Xavier init, 48 blocks, in float64. Three "
    "comparisons (Holm): DeepNorm's ratio is within a factor of 10 of 1, and that of each wrong variant is at least "
    "10 times further from 1, paired by seed. Confirmed if all three hold, refuted if the opposite of one does. What "
    "the details do to the size of updates in training is not judged here.",
    protocols={
        "quick": Protocol(
            minutes=0.3,
            flags="--tokenizer bytes --dim 64 --layers 48 --heads 2 --context 64 --init xavier --no-fast",
            arms=tuple({"norm": "layernorm", "placement": placement} for placement in ("deepnorm", *WRONG)),
            seeds=10,
            settings={"rows": 4},
        )
    },
    measure=measure,
    judge=judge,
    plot=plot,
)
