"""The figure of a claim."""

from matplotlib.figure import Figure

from experiments.claims.claim import Claim
from experiments.claims.judge import find
from experiments.claims.measure import Measured, Protocol
from experiments.statistics import estimate


def plot(claim: Claim, protocol: Protocol, measured: Measured) -> Figure:
    """Every comparison: a dot per seed, the mean with its 95% interval, and what the claim expects."""
    found = find(claim, protocol, measured)
    figure = Figure(figsize=(8, 1.5 + 0.6 * len(found)), layout="constrained")
    axes = figure.subplots()
    for height, each in enumerate(found):
        middle = estimate(each.values)
        axes.plot(each.values, [height] * len(each.values), "o", color="C0", alpha=0.4)
        axes.errorbar(middle.mean, height, xerr=middle.half_width, fmt="s", color="C1", capsize=4)
        label = each.comparison.statement
        axes.text(0.01, height - 0.3, label, transform=axes.get_yaxis_transform(), fontsize="small", in_layout=False)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks([])
    axes.set_ylim(len(found), -1)
    axes.set_xlabel(", ".join({each.comparison.value for each in found}))
    figure.suptitle(claim.statement, fontsize="medium", wrap=True)
    return figure
