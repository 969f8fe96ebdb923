"""Claim 9. DyT can replace the norm."""

from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Claim, Judgment, Measured, Protocol
from experiments.claims.figures import plot_differences
from experiments.claims.runs import GPU_LRS, GPU_RUN, NO_STATISTICS, Runs, make_runs, nats, paired
from experiments.claims.verdict import ALPHA, left_open, p_above
from experiments.statistics import estimate, holm, noninferiority_p

MARGIN = 0.02  # nats per token
ALPHAS = (0.5, 2.0, 8.0)
LENGTHS = ("40", "2000")  # of 32,768 tokens a step: 1.3 and 65 million tokens


def arm(norm: str, steps: str) -> dict[str, str]:
    evaluations = {"eval_every": str(int(steps) // 10), "save_every": steps}
    return {"norm": norm, "placement": "pre", "steps": steps, **evaluations}


ARMS = tuple(arm(norm, steps) for steps in LENGTHS for norm in ("rmsnorm", *(f"dyt:alpha={alpha}" for alpha in ALPHAS)))


def judge(measured: Measured) -> Judgment:
    runs = Runs(measured["runs"])
    if runs.diverged:
        return left_open(runs.diverged)
    found, as_good, worse = {}, [], []
    for steps in LENGTHS:
        both = runs.where(steps=steps)
        dyt = Runs(row for row in both.rows if row["arm"]["norm"] != "rmsnorm")
        for which in ("val_loss", "best_val_loss"):
            differences = paired(dyt, both.where(norm="rmsnorm"), which)
            found[steps, which] = estimate(differences)
            as_good.append(noninferiority_p(differences, MARGIN))
            worse.append(p_above(differences, MARGIN))
    p_good = max(p for p in holm(as_good) if p is not None)
    p_worse = min(p for p in holm(worse) if p is not None)
    ours = "; ".join(f"{nats(found[steps, 'val_loss'])} after {steps} steps" for steps in LENGTHS)
    if p_good < ALPHA:
        return Judgment(CONFIRMED, ours, f"no worse, up to {MARGIN}, at both lengths and checkpoints", p_good)
    if p_worse < ALPHA:
        return Judgment(REFUTED, ours, f"worse by more than {MARGIN} in one of the four", p_worse)
    return Judgment(OPEN, ours, f"may be worse by {MARGIN}", p_good)


CLAIM = Claim(
    number=9,
    name="dyt-replaces-norm",
    statement="DyT can replace the norm",
    source="Transformers without Normalization, arXiv 2503.10622",
    published="ViT-B 82.5 against 82.3 with LayerNorm",
    rule="DyT at its best initial alpha minus RMSNorm, paired by seed, each at its best learning rate, for 1.3 and 65 "
    "million tokens and for the last and the best evaluation (Holm over four tests). Confirmed if DyT is worse by less "
    f"than {MARGIN} nats in all four (one-sided, p < 0.05), refuted if it is worse by more in one of them.",
    protocols={
        "gpu": Protocol(minutes=900, flags=f"{GPU_RUN} {NO_STATISTICS}", arms=ARMS, lrs=GPU_LRS, best_variant=True)
    },
    measure=make_runs,
    judge=judge,
    plot=plot_differences,
)
