"""Claim 15. RMSNorm is more robust to outliers than LayerNorm."""

from statistics import mean

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from experiments.claims.claim import Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.verdict import Comparison, all_of
from experiments.statistics import estimate
from norms import build_norm

NORMS = ("rmsnorm", "layernorm")
MARGIN = 0.01  # of what is left; without an outlier, 1 is left
JUDGED = 100.0  # the size of the outlier


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """What an outlier in the first feature leaves of the others, by size of the outlier, norm and seed."""
    rows = []
    for seed in range(protocol.seeds):
        clean = torch.randn(
            protocol.settings["dim"], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        for size in protocol.settings["sizes"]:
            x = clean.clone()
            x[0] = size
            for kind in NORMS:
                left, shift = effect(build_norm(kind, len(x)), clean, x)
                rows.append({"norm": kind, "seed": seed, "size": size, "left": left, "shift": shift})
    return {"rows": rows}


@torch.no_grad()
def effect(norm: nn.Module, clean: Tensor, x: Tensor) -> tuple[float, float]:
    """Of all outputs but the first: their standard deviation relative to that without the outlier, and how far their
    mean moves, in standard deviations.
    """
    before, after = norm(clean)[1:], norm(x)[1:]
    return float(after.std() / before.std()), float((after.mean() / after.std() - before.mean() / before.std()).abs())


def values(measured: Measured, norm: str, size: float, name: str) -> list[float]:
    return [row[name] for row in measured["rows"] if (row["norm"], row["size"]) == (norm, size)]


def judge(measured: Measured) -> Judgment:
    rmsnorm, layernorm = (values(measured, norm, JUDGED, "left") for norm in NORMS)
    differences = [ours - theirs for ours, theirs in zip(rmsnorm, layernorm, strict=True)]
    shifts = [mean(values(measured, norm, JUDGED, "shift")) for norm in NORMS]
    ours = (
        f"RMSNorm leaves {mean(rmsnorm):.4f} of the rest, LayerNorm {mean(layernorm):.4f}; difference "
        f"{estimate(differences):+.5f}; they move its mean by {shifts[0]:.2f} and {shifts[1]:.2f} of its sd"
    )
    return all_of([Comparison(f"RMSNorm leaves more by {MARGIN:g}", differences, "above", MARGIN)], ours)


def plot(measured: Measured) -> Figure:
    """What is left of the rest, and how far it moves, over the size of the outlier."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    labels = {"left": "sd of the rest / sd without outlier", "shift": "shift of the rest, in its sd"}
    sizes = sorted({row["size"] for row in measured["rows"]})
    for axes, (name, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        for kind, style in zip(NORMS, ("o-", "s--"), strict=True):
            axes.plot(
                sizes, [mean(values(measured, kind, size, name)) for size in sizes], style, label=kind, mfc="none"
            )
        axes.axvline(JUDGED, color="0.3", linestyle=":", linewidth=1)
        axes.set(xscale="log", xlabel="size of the outlier", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


CLAIM = Claim(
    number=15,
    name="outliers",
    statement="RMSNorm is more robust to outliers than LayerNorm",
    source="article 003",
    published="none; measured before: both shrink the rest to 0.22",
    rule=f"One of 512 standard normal values is {JUDGED:g}. What is left is the standard deviation of the others after "
    "the norm, relative to that without the outlier. RMSNorm's minus LayerNorm's, paired by seed, is compared with "
    f"{MARGIN}: confirmed if it is larger, refuted if it is smaller (t test). That LayerNorm also moves the others' "
    "mean, and RMSNorm does not, is shown, but not judged.",
    protocols={
        "quick": Protocol(
            minutes=0.1, seeds=50, settings={"dim": 512, "sizes": (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)}
        )
    },
    measure=measure,
    judge=judge,
    plot=plot,
)
