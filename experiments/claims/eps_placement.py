"""Claim 13. Whether ε is inside or outside the root of RMSNorm does not matter, except near zero."""

import math

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.initial import initial_model, random_batch, with_norms
from model import Llama
from norms.numerics import upcast
from norms.rmsnorm import RMSNorm

MATTERS = 0.02  # relative difference. One norm's is ε / (2 RMS²): 0.5% at 10√ε; a model multiplies several norms
FAR = 10  # an input is far from zero if its RMS is at least this many √ε
NEAR = 1  # and near zero if it is at most this many


class EpsOutside(RMSNorm):
    """x / (sqrt(mean(x²)) + eps) · weight: at a zero row, its gradient is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        h = upcast(x)
        return (h / (h.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight).to(x.dtype)


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """Relative differences between the two norms, alone and in a model, over ε and the RMS of the input."""
    rows = []
    with with_norms({"eps-outside": EpsOutside}):
        for seed in range(protocol.seeds):
            for eps in protocol.settings["eps"]:
                inside, outside = (
                    initial_model(protocol, {"norm": f"{norm}:eps={eps}"}, seed).double()
                    for norm in ("rmsnorm", "eps-outside")
                )
                for rms in protocol.settings["rms"]:
                    compared = {
                        "norm": compare_norms(rms, eps, protocol.settings["dim"], seed),
                        "model": compare_models(inside, outside, rms, protocol.settings["rows"], seed),
                    }
                    for what, (output, gradient) in compared.items():
                        row = {"what": what, "seed": seed, "eps": eps, "rms": rms}
                        rows.append(row | {"output": output, "gradient": gradient})
    return {
        "rows": rows,
        "finite gradient at zero": {norm.__name__: finite_at_zero(norm) for norm in (RMSNorm, EpsOutside)},
    }


def compare_norms(rms: float, eps: float, dim: int, seed: int) -> tuple[float, float]:
    """Differences of the output and of the input's gradient, for random rows of this RMS."""
    x, grad_y = torch.randn(2, 64, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = (rms * x / x.square().mean(-1, keepdim=True).sqrt()).requires_grad_()
    outputs = [norm(dim, eps)(x) for norm in (RMSNorm, EpsOutside)]
    gradients = [torch.autograd.grad(y, x, grad_y)[0] for y in outputs]
    return relative_difference(*outputs), relative_difference(*gradients)


def compare_models(inside: Llama, outside: Llama, rms: float, rows: int, seed: int) -> tuple[float, float]:
    """Differences of the logits and of the gradient of all weights, with an embedding of this RMS."""
    logits, gradients = [], []
    for model in (inside, outside):
        with torch.no_grad():
            embedding = model.embed_tokens.weight
            embedding.mul_(rms / embedding.square().mean().sqrt())
        tokens, targets = random_batch(model, rows, seed)
        logits.append(model(tokens))
        loss = nn.functional.cross_entropy(logits[-1].flatten(0, 1), targets.flatten())
        gradients.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))]))
    return relative_difference(*logits), relative_difference(*gradients)


def relative_difference(inside: Tensor, outside: Tensor) -> float:
    return float(((outside - inside).norm() / inside.norm()).detach())


def finite_at_zero(norm: type[RMSNorm]) -> bool:
    """Whether a zero row has a finite gradient."""
    x = torch.zeros(1, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm(8)(x).sum(), x)
    return bool(gradient.isfinite().all())


def judge(measured: Measured) -> Judgment:
    far, near = [], []
    for row in measured["rows"]:
        distance, difference = row["rms"] / math.sqrt(row["eps"]), max(row["output"], row["gradient"])
        if distance >= FAR * (1 - 1e-9):
            far.append(difference)
        elif distance <= NEAR * (1 + 1e-9):
            near.append(difference)
    if not far or not near:
        return Judgment(OPEN, "–", "the grid lacks inputs far from zero or near it")
    finite = measured["finite gradient at zero"]
    ours = (
        f"from an RMS of {FAR}√ε on at most {max(far):.2%}, up to √ε at least {min(near):.0%}; gradient at a zero row "
        f"{'finite' if finite['RMSNorm'] else 'NaN'} inside, {'finite' if finite['EpsOutside'] else 'NaN'} outside"
    )
    if max(far) > MATTERS:
        return Judgment(REFUTED, ours, "it matters far from zero")
    if max(near) <= MATTERS and finite["RMSNorm"] == finite["EpsOutside"]:
        return Judgment(REFUTED, ours, "it does not matter near zero either")
    if min(near) > MATTERS and finite["RMSNorm"] and not finite["EpsOutside"]:
        return Judgment(CONFIRMED, ours, f"the difference exceeds {MATTERS:.0%} near zero only")
    return Judgment(OPEN, ours, "near zero it matters in a part of the cases")


def plot(measured: Measured) -> Figure:
    """The larger of the two differences over RMS / √ε: the worst seed of each cell."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, what, title in zip(
        panels, ("norm", "model"), ("one norm", "a whole model, over its embedding"), strict=True
    ):
        rows = [row for row in measured["rows"] if row["what"] == what]
        for number, eps in enumerate(sorted({row["eps"] for row in rows})):
            worst: dict[float, float] = {}
            for row in rows:
                if row["eps"] == eps:
                    distance = row["rms"] / math.sqrt(eps)
                    worst[distance] = max(worst.get(distance, 0), row["output"], row["gradient"])
            axes.loglog(*zip(*sorted(worst.items()), strict=True), "o-", color=f"C{number}", label=f"ε = {eps:g}")
        axes.axhline(MATTERS, color="0.3", linestyle="--", linewidth=1)
        for distance in (NEAR, FAR):
            axes.axvline(distance, color="0.3", linestyle=":", linewidth=1)
        axes.set(title=title, xlabel="RMS of the input / √ε")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative difference, output or gradient")
    panels[1].legend()
    return figure


CLAIM = Claim(
    number=13,
    name="eps-placement",
    statement="Whether ε is inside or outside the root of RMSNorm does not matter, except near zero",
    source="article 000, which has it outside",
    published="none found",
    rule="Relative differences of outputs and gradients, of one norm and of a whole Llama, over ε, the RMS of the "
    "input (of the embedding in the Llama) and seeds, in float64. Refuted if one is above "
    f"{MATTERS:.0%} where the RMS is at least {FAR}√ε, or if none is where it is at most √ε and zero rows have the "
    f"same kind of gradient. Confirmed if not refuted, all are above {MATTERS:.0%} where the RMS is at most √ε, and "
    "the gradient at a zero row is finite inside but not outside. Between the two nothing is judged.",
    protocols={
        "quick": Protocol(
            minutes=0.15,
            flags="--tokenizer bytes --dim 64 --layers 2 --heads 2 --context 32 --no-fast",
            seeds=3,
            settings={
                "eps": (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3),
                "rms": (1e-5, 1e-4, 1e-3, 1e-2, 0.02, 0.1, 1.0),
                "dim": 512,
                "rows": 2,
            },
        )
    },
    measure=measure,
    judge=judge,
    plot=plot,
)
