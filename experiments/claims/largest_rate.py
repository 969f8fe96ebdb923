"""Claim 12. Normalization permits higher learning rates and cares less about the initialization."""

import math
from statistics import mean

from matplotlib.figure import Figure

from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.runs import CLEARLY, CPU_MODEL, Runs, geometric, learned, make_grid, make_runs, unigram_loss
from experiments.claims.verdict import ALPHA
from experiments.statistics import holm, sign_flip_p

INITS = ("normal", "xavier")
KINDS = {
    "pre": {"norm": "rmsnorm", "placement": "pre"},
    "none": {"norm": "none", "placement": "pre"},
    "rezero": {"norm": "none", "placement": "rezero"},
}
LABELS = {"pre": "RMSNorm, pre-norm", "none": "no norm", "rezero": "ReZero, no norm"}
RUN = f"{CPU_MODEL} --optimizer adamw --steps 100 --eval-every 100 --eval-tokens 16384 --save-every 100 --keep 1"
LRS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """The runs, and the loss of a model that knows the frequencies of the bytes only."""
    val = make_grid(protocol, lab).data.val.tokens
    return make_runs(protocol, lab) | {"unigram": unigram_loss(val)}


def largest_stable(measured: Measured, kind: str, init: str) -> dict[int, float]:
    """By seed, the highest rate before the first failure above a success. Half the lowest rate if all runs fail.

    A run fails if it does not learn clearly more than the frequencies of the bytes. Failures below all successes do not
    count: those rates are too low for so few steps.
    """
    runs = Runs(measured["runs"]).where(**KINDS[kind], init=init)
    found: dict[int, float] = {}
    for seed in {row["seed"] for row in runs.rows}:
        rows = sorted(runs.where(seed=seed).rows, key=lambda row: row["lr"])
        for row in rows:
            if learned(row, measured["unigram"]):
                found[seed] = row["lr"]
            elif seed in found:
                break
        found.setdefault(seed, rows[0]["lr"] / 2)
    return found


def judge(measured: Measured) -> Judgment:
    rates = {(kind, init): largest_stable(measured, kind, init) for kind in KINDS for init in INITS}
    seeds = sorted(rates["pre", "normal"])
    higher = [mean(math.log(rates["pre", init][seed] / rates["none", init][seed]) for init in INITS) for seed in seeds]

    def spread(kind: str, seed: int) -> float:
        normal, xavier = (rates[kind, init][seed] for init in INITS)
        return abs(math.log(normal / xavier))

    cares = [spread("none", seed) - spread("pre", seed) for seed in seeds]
    p_higher, p_cares = holm([sign_flip_p(higher), sign_flip_p(cares)])
    assert p_higher is not None and p_cares is not None
    with_rezero = geometric(rates["rezero", init][seed] / rates["none", init][seed] for init in INITS for seed in seeds)
    ours = (
        f"largest stable rate with the norm {math.exp(mean(higher)):.1f} times that without; with ReZero instead "
        f"{math.exp(with_rezero.mean):.1f} times; the inits move it by a factor of "
        f"{math.exp(mean(spread('pre', seed) for seed in seeds)):.1f} with the norm, "
        f"{math.exp(mean(spread('none', seed) for seed in seeds)):.1f} without (n = {len(seeds)})"
    )
    if p_higher < ALPHA and mean(higher) < 0:
        return Judgment(REFUTED, ours, "the norm needs lower rates", p_higher)
    if p_cares < ALPHA and mean(cares) < 0:
        return Judgment(REFUTED, ours, "with the norm, the initialization matters more", p_cares)
    if p_higher < ALPHA and p_cares < ALPHA:
        return Judgment(CONFIRMED, ours, "higher rates, and less difference between the inits", max(p_higher, p_cares))
    if p_higher < ALPHA:
        return Judgment(OPEN, ours, "higher rates, but the inits may matter as much", p_cares)
    return Judgment(OPEN, ours, "the largest rates may be equal", p_higher)


def plot(measured: Measured) -> Figure:
    """Final loss of every run against the learning rate, by init. A cross at the top: diverged, or off the scale."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    limit = 1.5 * measured["unigram"]
    for axes, init in zip(figure.subplots(1, 2, sharey=True), INITS, strict=True):
        for number, (kind, arm) in enumerate(KINDS.items()):
            rows = Runs(measured["runs"]).where(**arm, init=init).rows
            seen = [row for row in rows if not row["diverged"] and row["val_loss"] < limit]
            shift = 1.1 ** (number - 1)
            axes.plot(
                [row["lr"] * shift for row in seen], [row["val_loss"] for row in seen], "o", mfc="none",
                label=LABELS[kind],
            )  # fmt: skip
            lost = [row["lr"] * shift for row in rows if row not in seen]
            axes.plot(lost, [0.97] * len(lost), "x", color=f"C{number}", transform=axes.get_xaxis_transform())
        axes.axhline(measured["unigram"], color="0.5", linewidth=1, label="frequencies only")
        axes.set(xscale="log", xlabel="learning rate", title=f"init {init}")
    figure.axes[0].set_ylabel("validation loss (nats per token)")
    figure.axes[0].legend()
    return figure


CLAIM = Claim(
    number=12,
    name="largest-rate",
    statement="Normalization permits higher learning rates and cares less about the initialization",
    source="article 003; ReZero is All You Need, arXiv 2003.04887",
    published="ReZero 56% faster on enwik8",
    rule=f"A run fails if it diverges, or does not end {CLEARLY} nats below the loss of a model that knows only "
    "the frequencies of the bytes. The largest stable rate of a seed is the last before the first failure, from the "
    "lowest rate that does not fail: lower ones are too low for so few steps. Two comparisons, paired by seed "
    "(exact sign-flip tests, Holm): its logarithm with RMSNorm, pre-norm, minus that without a norm, averaged over two "
    "inits; and the difference that the init makes to it, without minus with the norm. Confirmed if both are above 0 "
    "(p < 0.05), refuted if either is below 0.",
    protocols={
        "cpu": Protocol(
            minutes=25,
            flags=RUN,
            arms=tuple(arm | {"init": init} for init in INITS for arm in KINDS.values()),
            lrs=LRS,
            select_lr=False,
            seeds=8,
        )
    },
    measure=measure,
    judge=judge,
    plot=plot,
)
