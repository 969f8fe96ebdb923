"""Claim 17. Normalization makes training faster by removing internal covariate shift."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.batches import evaluation_batches
from experiments.claims.claim import Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.figures import arms_of, labels
from experiments.claims.runs import CPU_LRS, CPU_RUN, WIDEN, Runs, make_grid, nats, paired, ratio, to_json
from experiments.claims.verdict import Comparison, all_of, left_open
from experiments.statistics import estimate
from model import Llama
from optim import learning_rate
from runtime.device import pick_dtype
from runtime.run import Run
from train import Trainer, evaluate

BASELINE = {"norm": "none", "placement": "pre"}
NORMS = ("rmsnorm", "layernorm")
REMOVED = 0.5  # drift relative to that without a norm
PROBE_ROWS = 8  # windows of the validation text

Statistics = tuple[Tensor, Tensor]  # mean and variance of each feature of each sublayer's input, (sublayers, C)


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """Runs with their loss and drift, at each arm's best learning rate, and the runs that selected it."""
    grid = make_grid(protocol, lab)
    arms = list(grid.settings)
    best, selection = grid.select_lrs(arms, list(protocol.lrs), first_seed=0, widen=WIDEN)
    runs = []
    for seed, arm in product(range(protocol.seeds), arms):
        model_config, config = grid.settings[arm]
        config = replace(config, lr=best[arm], seed=seed)
        device = torch.device(lab.device)
        run = Run(Path(), model_config, config, device, pick_dtype(config.dtype, device), grid.data)  # writes nothing
        runs.append({"arm": dict(arm.factors), "lr": config.lr, "seed": seed} | train_and_watch(run))
    return {"runs": runs, "selection": [to_json(outcome) for outcome in selection.values()]}


def train_and_watch(run: Run) -> dict[str, Any]:
    """Train, and measure after each step how far it moved the inputs of the sublayers on a fixed batch."""
    trainer, config, context = Trainer(run), run.config, run.model_config.context
    ((tokens, _),) = evaluation_batches(run.data.val.tokens, context, PROBE_ROWS, PROBE_ROWS * context)
    before, drifts = input_statistics(trainer.model, tokens), []
    for step in range(config.steps):
        trainer.update(learning_rate(config, step))
        trainer.step += 1
        after = input_statistics(trainer.model, tokens)
        drifts.append(drift(before, after))
        before = after
    if trainer.meter.bad_steps():
        return {"diverged": True, "val_loss": None, "log_drift": None}
    loss, total = evaluate(trainer.model, run)[0], mean(drifts)
    diverged = not (loss < math.log(run.model_config.vocab_size) and 0 < total < math.inf)
    return {"diverged": diverged, "val_loss": loss, "log_drift": None if diverged else math.log(total)}


@torch.no_grad()
def input_statistics(model: Llama, tokens: Tensor) -> Statistics:
    """Mean and variance over `tokens` of what each attention and each MLP gets: the output of its norm, if any."""
    inputs: list[Tensor] = []
    hooks = [
        sublayer.register_forward_pre_hook(lambda sublayer, args: inputs.append(args[0].flatten(0, 1)))
        for block in model.layers
        for sublayer in (block.get_submodule("self_attn"), block.get_submodule("mlp"))
    ]
    model.hidden(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack([x.mean(0) for x in inputs]), torch.stack([x.var(0) for x in inputs])


def drift(before: Statistics, after: Statistics) -> float:
    """Symmetric Kullback-Leibler divergence of normal distributions with these statistics, in nats per feature.

    Scaling and shifting a feature in both changes nothing, so models with inputs of different sizes can be compared.
    """
    (mean0, var0), (mean1, var1) = before, after
    squared = (mean1 - mean0).square()
    return float(((var0 + squared) / var1 + (var1 + squared) / var0 - 2).mean() / 2)


def judge(measured: Measured) -> Judgment:
    runs = Runs(measured["runs"])
    baseline, compared = runs.where(**BASELINE), [runs.where(norm=norm) for norm in NORMS]
    if diverged := baseline.diverged + sum(arm.diverged for arm in compared):
        return left_open(diverged)
    comparisons, ours = [], []
    for norm, arm in zip(NORMS, compared, strict=True):
        log_drifts, losses = paired(arm, baseline, "log_drift"), paired(arm, baseline)
        comparisons.append(Comparison(f"{norm} at least halves drift", log_drifts, "below", math.log(REMOVED)))
        comparisons.append(Comparison(f"{norm} trains faster", losses, "below"))
        ours.append(f"{norm}: drift × {ratio(estimate(log_drifts))}, loss {nats(estimate(losses))}")
    return all_of(comparisons, "; ".join(ours))


def plot(measured: Measured) -> Figure:
    """Loss over drift. Runs that diverged are missing."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    arms = arms_of(measured)
    for arm, name in zip(arms, labels(arms), strict=True):
        runs = Runs(measured["runs"]).where(**arm, diverged=False).rows
        axes.semilogx([math.exp(row["log_drift"]) for row in runs], [row["val_loss"] for row in runs], "o", label=name)
    axes.set(xlabel="drift per step (nats per feature)", ylabel="validation loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


CLAIM = Claim(
    number=17,
    name="covariate-shift",
    statement="Normalization makes training faster by removing internal covariate shift",
    source="articles 000, 002 and 003",
    published="1805.11604 says no for BatchNorm",
    rule="Drift is how far a step moves the distribution of each sublayer's input on a fixed batch: the symmetric "
    "Kullback-Leibler divergence of normal distributions with the mean and variance of each feature, averaged over "
    "features, sublayers and steps. Each arm at its best learning rate, paired by seed. Four comparisons (Holm): with "
    f"RMSNorm and with LayerNorm, pre-norm, the drift is below {REMOVED:g} times that without a norm, and the final "
    "loss is lower. Confirmed if all four hold, refuted if the opposite of one does: then a norm makes training faster "
    "without removing the shift, or not faster. ReZero without a norm is shown.",
    protocols={
        "cpu": Protocol(
            minutes=15,
            flags=f"{CPU_RUN} --no-fast",
            arms=(
                BASELINE,
                *({"norm": norm, "placement": "pre"} for norm in NORMS),
                {"norm": "none", "placement": "rezero"},
            ),
            lrs=CPU_LRS,
        )
    },
    measure=measure,
    judge=judge,
    plot=plot,
)
