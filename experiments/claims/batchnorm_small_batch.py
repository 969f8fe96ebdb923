"""Claim 10. BatchNorm suffers at small batch sizes, LayerNorm does not."""

from matplotlib.figure import Figure

from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Claim, Judgment, Measured, Protocol
from experiments.claims.figures import plot_differences
from experiments.claims.runs import CPU_LRS, CPU_MODEL, Runs, make_runs, nats, paired
from experiments.claims.verdict import ALPHA, left_open
from experiments.statistics import differences_of_differences, equivalence_p, estimate

MARGIN = 0.02  # nats per token
SEQUENCES = 3200  # in all, whatever the batch size
SIZES = ("32", "8", "2")


def arm(norm: str, batch_size: str) -> dict[str, str]:
    steps = str(SEQUENCES // int(batch_size))
    same = {"steps": steps, "eval_every": steps, "save_every": steps}
    return {"norm": norm, "placement": "pre", "batch_size": batch_size, **same}


ARMS = tuple(arm(norm, size) for size in SIZES for norm in ("layernorm", "batchnorm"))


def judge(measured: Measured) -> Judgment:
    runs = Runs(measured["runs"])
    if runs.diverged:
        return left_open(runs.diverged)
    penalty = {
        size: estimate(paired(runs.where(**arm("batchnorm", size)), runs.where(**arm("layernorm", size))))
        for size in SIZES
    }
    values = differences_of_differences(
        *(runs.where(**arm(norm, size)).losses() for size in ("2", "32") for norm in ("batchnorm", "layernorm"))
    )
    found, small = estimate(values), equivalence_p(values, MARGIN)
    assert found.p is not None and small is not None
    ours = f"{nats(found)}; the penalty is {', '.join(f'{penalty[size]:+.3f} at {size}' for size in SIZES)}"
    if found.p < ALPHA and found.mean > 0:
        return Judgment(CONFIRMED, ours, "BatchNorm's penalty is larger at batch size 2 than at 32", found.p)
    if found.p < ALPHA:
        return Judgment(REFUTED, ours, "BatchNorm's penalty is smaller at batch size 2 than at 32", found.p)
    if small < ALPHA:
        return Judgment(REFUTED, ours, f"the penalties are equal within ±{MARGIN} (TOST)", small)
    return Judgment(OPEN, ours, "the penalties may be equal", found.p)


def plot(measured: Measured) -> Figure:
    """With BatchNorm minus LayerNorm for each batch size."""
    return plot_differences(measured, [(arm("batchnorm", size), arm("layernorm", size)) for size in SIZES])


CLAIM = Claim(
    number=10,
    name="batchnorm-small-batch",
    statement="BatchNorm suffers at small batch sizes, LayerNorm does not",
    source="articles 002, 003 and 004; Group Normalization, arXiv 1803.08494",
    published="10.6 points of accuracy at batch 2, in images",
    rule="The penalty is BatchNorm's loss minus LayerNorm's, evaluated with running statistics, at equal numbers of "
    "tokens and each at its best learning rate. Confirmed if the penalty at batch size 2 minus the penalty at 32, "
    f"paired by seed, is above 0 (p < 0.05), refuted if it is below 0 or within ±{MARGIN} nats (TOST).",
    protocols={
        "cpu": Protocol(
            minutes=35, flags=f"{CPU_MODEL} --optimizer adamw --eval-tokens 32768 --keep 1", arms=ARMS, lrs=CPU_LRS
        )
    },
    measure=make_runs,
    judge=judge,
    plot=plot,
)
