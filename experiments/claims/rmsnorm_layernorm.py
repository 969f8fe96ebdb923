"""Claim 1. RMSNorm is as good as LayerNorm."""

from experiments.claims.claim import Claim, Judgment, Measured, Protocol
from experiments.claims.figures import plot_differences
from experiments.claims.runs import CPU_LRS, CPU_RUN, GPU_LRS, GPU_RUN, Runs, make_runs, paired
from experiments.claims.verdict import equal_within

MARGIN = 0.02  # nats per token
ARMS = ({"norm": "layernorm", "placement": "pre"}, {"norm": "rmsnorm", "placement": "pre"})


def judge(measured: Measured) -> Judgment:
    runs = Runs(measured["runs"])
    differences = paired(runs.where(norm="rmsnorm"), runs.where(norm="layernorm"))
    return equal_within(differences, MARGIN, runs.diverged)


CLAIM = Claim(
    number=1,
    name="rmsnorm-layernorm",
    statement="RMSNorm is as good as LayerNorm",
    source="articles 002 and 003; Root Mean Square Layer Normalization, arXiv 1910.07467",
    published="comparable",
    rule=f"RMSNorm's final validation loss minus LayerNorm's, paired by seed, each at its best learning rate. "
    f"Confirmed if it is within ±{MARGIN} nats (TOST, p < 0.05), refuted if its 95% interval lies outside.",
    protocols={
        # Seeds 0 to 7 came out as -0.007 ± 0.019, inconclusive. These are 20 others.
        "cpu": Protocol(minutes=15, flags=CPU_RUN, arms=ARMS, lrs=CPU_LRS, seeds=20, settings={"first_seed": 8}),
        "gpu": Protocol(minutes=300, flags=GPU_RUN, arms=ARMS, lrs=GPU_LRS, seeds=5),
    },
    measure=make_runs,
    judge=judge,
    plot=plot_differences,
)
