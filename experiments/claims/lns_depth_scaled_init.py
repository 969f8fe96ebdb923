"""Claim 8. LNS helps, but not more than depth-scaled initialization does."""

from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Claim, Judgment, Measured, Protocol
from experiments.claims.figures import plot_differences
from experiments.claims.runs import GPU_LRS, GPU_RUN, Runs, make_runs, nats, paired
from experiments.claims.verdict import ALPHA, left_open
from experiments.statistics import estimate, holm

MARGIN = 0.005  # nats per token
PLAIN = {"norm": "rmsnorm", "placement": "pre", "depth_scaled_init": "false"}
SCALED = {"norm": "rmsnorm", "placement": "pre", "depth_scaled_init": "true"}
LNS = {"norm": "rmsnorm", "placement": "lns", "depth_scaled_init": "false"}  # scales by depth itself


def judge(measured: Measured) -> Judgment:
    runs = Runs(measured["runs"])
    if runs.diverged:
        return left_open(runs.diverged)
    lns, plain, scaled = (runs.where(**arm) for arm in (LNS, PLAIN, SCALED))
    helps, more = estimate(paired(lns, plain)), estimate(paired(lns, scaled))
    p_helps, p_more = holm([helps.p, more.p])
    assert p_helps is not None and p_more is not None
    ours = f"LNS minus pre-norm {nats(helps)}; minus pre-norm with depth-scaled init {nats(more)}"
    if p_helps < ALPHA and helps.mean > 0:
        return Judgment(REFUTED, ours, "LNS is worse than pre-norm", p_helps)
    if p_more < ALPHA and more.mean < 0:
        return Judgment(REFUTED, ours, "LNS is better than depth-scaled init too", p_more)
    if p_helps < ALPHA and more.low > -MARGIN:
        return Judgment(CONFIRMED, ours, "LNS is better than pre-norm, and not than depth-scaled init", p_helps)
    return Judgment(OPEN, ours, "the differences may be 0", p_helps)


CLAIM = Claim(
    number=8,
    name="lns-depth-scaled-init",
    statement="LNS helps pre-norm, but no more than depth-scaled initialization does",
    source="The Curse of Depth, arXiv 2502.05795",
    published="perplexity 26.73 to 25.76 at 130M",
    rule="Three arms of at least 12 blocks, paired by seed, each at its best learning rate (Holm, two comparisons). "
    "Confirmed if LNS is below pre-norm with plain init (p < 0.05) and the interval of LNS minus pre-norm with "
    f"depth-scaled init lies above -{MARGIN} nats. Refuted if LNS is worse than the first or better than the second.",
    protocols={
        "gpu": Protocol(minutes=600, flags=f"{GPU_RUN} --layers 12", arms=(PLAIN, SCALED, LNS), lrs=GPU_LRS),
    },
    measure=make_runs,
    judge=judge,
    plot=plot_differences,
)
