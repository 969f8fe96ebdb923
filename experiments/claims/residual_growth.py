"""Claim 7. The residual stream grows with depth under pre-norm; sandwich and LNS bound it."""

import math
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from data.batches import evaluation_batches
from experiments.ablation.grid import Cell
from experiments.ablation.outcome import Arm
from experiments.claims.claim import Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.initial import initial_model, random_batch
from experiments.claims.runs import DEEP_RUN, Runs, make_grid, make_runs
from experiments.claims.verdict import Comparison, all_of
from experiments.probe import probe
from experiments.statistics import estimate, slope
from model import Llama
from runtime.checkpoint import load_pretrained

ARMS = tuple({"norm": "rmsnorm", "placement": placement} for placement in ("pre", "sandwich", "lns"))
INITS = ("xavier", "normal")


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """The mean square of the residual stream after each block, from the first."""
    return at_initialization(protocol) if lab.scale == "quick" else after_training(protocol, lab)


def at_initialization(protocol: Protocol) -> Measured:
    rows = []
    for seed in range(protocol.seeds):
        for init in INITS:
            for arm in protocol.arms:
                model = initial_model(protocol, {**arm, "init": init}, seed)
                blocks = probe(model, *random_batch(model, protocol.settings["rows"], seed))[1:]
                rows.append(variance_row(arm["placement"], init, seed, [block.residual_rms for block in blocks]))
    return {"judged": "xavier", "rows": rows}


def after_training(protocol: Protocol, lab: Lab) -> Measured:
    """On a batch of validation text, before and after training."""
    measured, grid, rows = make_runs(protocol, lab), make_grid(protocol, lab), []
    for row in Runs(measured["runs"]).where(diverged=False).rows:
        arm, seed = Arm.of(**row["arm"]), row["seed"]
        config = grid.settings[arm][0]
        batch = next(evaluation_batches(grid.data.val.tokens, config.context, protocol.settings["rows"]))
        trained = load_pretrained(grid.checkpoint(Cell(arm, row["lr"], seed)), "cpu")[0]
        for condition, model in (("before training", Llama(config, seed)), ("after training", trained)):
            blocks = probe(model, *batch)[1:]
            rows.append(variance_row(arm["placement"], condition, seed, [block.residual_rms for block in blocks]))
    return measured | {"judged": "after training", "rows": rows}


def variance_row(placement: str, condition: str, seed: int, residual_rms: list[float]) -> dict[str, Any]:
    """A row of the measurements. `condition` is what else a model differs in; one condition is judged."""
    variance = [rms * rms for rms in residual_rms]
    return {"placement": placement, "condition": condition, "seed": seed, "variance": variance}


def exponents(measured: Measured, placement: str, condition: str) -> list[float]:
    """The power of the block number with which the variance grows, by seed: 0 is bounded, 1 is linear growth."""
    return [
        slope([math.log(block) for block in range(1, len(row["variance"]) + 1)], [*map(math.log, row["variance"])])
        for row in measured["rows"]
        if (row["placement"], row["condition"]) == (placement, condition)
    ]


def judge(measured: Measured) -> Judgment:
    found = {arm["placement"]: exponents(measured, arm["placement"], measured["judged"]) for arm in ARMS}
    pre = found["pre"]
    comparisons = [Comparison("pre-norm grows", pre, "above")]
    for placement in ("sandwich", "lns"):
        excess = [mine - theirs / 2 for mine, theirs in zip(found[placement], pre, strict=True)]
        comparisons.append(Comparison(f"{placement} bounds it", excess, "below"))
    ours = ", ".join(f"{placement} {estimate(values):+.2f}" for placement, values in found.items())
    return all_of(comparisons, f"growth exponents: {ours}")


def plot(measured: Measured) -> Figure:
    """Residual variance over depth: the mean over seeds in every condition, and the range of the seeds."""
    conditions = list(dict.fromkeys(row["condition"] for row in measured["rows"]))
    figure = Figure(figsize=(4.5 * len(conditions), 3.6), layout="constrained")
    for axes, condition in zip(figure.subplots(1, len(conditions), squeeze=False)[0], conditions, strict=True):
        for number, arm in enumerate(ARMS):
            placement = arm["placement"]
            curves = [
                row["variance"]
                for row in measured["rows"]
                if (row["placement"], row["condition"]) == (placement, condition)
            ]
            by_block = list(zip(*curves, strict=True))
            blocks = range(1, len(by_block) + 1)
            middle = mean(exponents(measured, placement, condition))
            label = f"{placement}: exponent {middle:.2f}"
            axes.loglog(blocks, [mean(values) for values in by_block], color=f"C{number}", label=label)
            axes.fill_between(blocks, [*map(min, by_block)], [*map(max, by_block)], color=f"C{number}", alpha=0.2)
        judged = " (judged)" if condition == measured["judged"] else ""
        axes.set(title=f"{condition}{judged}", xlabel="block", ylabel="mean square of the residual stream")
        axes.legend()
        axes.grid(alpha=0.3)
    return figure


CLAIM = Claim(
    number=7,
    name="residual-growth",
    statement="The variance of the residual stream grows with depth under pre-norm; sandwich norm and LayerNorm "
    "scaling bound it",
    source="Peri-LN, arXiv 2502.02732; The Curse of Depth, arXiv 2502.05795",
    published="pre-norm grows exponentially with depth in training, Peri-LN linearly, LNS polynomially",
    rule="The growth exponent is the slope of the logarithm of the residual stream's mean square over the logarithm of "
    "the block's number. Three comparisons (Holm), paired by seed: pre-norm's exponent is above 0, and those of "
    "sandwich and LNS are below half of it. Confirmed if all three hold, refuted if the opposite of one does. Quick: "
    "at initialization, judged with Xavier init; N(0, 0.02²) is shown. Otherwise after training.",
    protocols={
        "quick": Protocol(
            minutes=0.25,
            flags="--tokenizer bytes --dim 64 --layers 48 --heads 2 --context 64 --no-fast",
            arms=ARMS,
            seeds=5,
            settings={"rows": 4},
        ),
        "cpu": Protocol(
            minutes=12, flags=DEEP_RUN, arms=ARMS, lrs=(1e-2,), select_lr=False, seeds=5, settings={"rows": 16}
        ),
    },
    measure=measure,
    judge=judge,
    plot=plot,
)
