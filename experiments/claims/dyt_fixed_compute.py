"""Claim 20. DyT is worse at fixed compute."""

from experiments.claims.claim import Claim, Judgment, Measured, Protocol
from experiments.claims.figures import arms_of, plot_differences
from experiments.claims.runs import CPU_LRS, CPU_RUN, GPU_LRS, GPU_RUN, NO_STATISTICS, Runs, make_runs, paired
from experiments.claims.verdict import lower

MARGIN = 0.005  # nats per token; a difference this small would not be called worse
ARMS = (
    {"norm": "rmsnorm", "placement": "pre"},
    *({"norm": f"dyt:alpha={alpha}", "placement": "pre"} for alpha in (1.0, 4.0, 16.0)),
)


def judge(measured: Measured) -> Judgment:
    runs = Runs(measured["runs"])
    rmsnorm, dyt = (runs.of(arm) for arm in arms_of(measured))
    return lower(paired(rmsnorm, dyt), MARGIN, runs.diverged)


CLAIM = Claim(
    number=20,
    name="dyt-fixed-compute",
    statement="DyT is worse than RMSNorm at fixed compute",
    source="the development log of nanochat, without seeds; against arXiv 2503.10622",
    published="worse, no figure",
    rule="RMSNorm's loss minus DyT's, paired by seed, each at its best learning rate and DyT at its best initial "
    f"alpha. Confirmed if it is below 0 (p < 0.05), refuted if it is above 0 or within ±{MARGIN} nats (TOST).",
    protocols={
        "cpu": Protocol(minutes=15, flags=f"{CPU_RUN} {NO_STATISTICS}", arms=ARMS, lrs=CPU_LRS, best_variant=True),
        "gpu": Protocol(minutes=600, flags=f"{GPU_RUN} {NO_STATISTICS}", arms=ARMS, lrs=GPU_LRS, best_variant=True),
    },
    measure=make_runs,
    judge=judge,
    plot=plot_differences,
)
