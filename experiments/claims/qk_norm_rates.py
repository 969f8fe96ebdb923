"""Claim 11. QK-norm widens the range of stable learning rates."""

import math
from statistics import mean

import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.batches import evaluation_batches
from experiments.ablation.grid import Cell
from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.runs import GPU_RUN, Runs, make_grid, make_runs
from experiments.claims.verdict import ALPHA
from experiments.statistics import sign_flip_p
from model import Attention, Llama, rotate
from runtime.checkpoint import load_pretrained

ARMS = ({"qk_norm": "none"}, {"qk_norm": "head"})
LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
WORSE = 0.1  # nats per token above the best of the arm and seed still counts as stable
FACTOR = 1.5  # ranges that differ by less are called equal


@torch.inference_mode()
def largest_logit(model: Llama, tokens: Tensor) -> float:
    """The largest absolute attention logit of all blocks, heads and pairs of positions."""
    largest = 0.0

    def record(attention, args) -> None:
        nonlocal largest
        x, rope = args[:2]
        shape = (-1, attention.head_dim)
        q = rotate(attention.q_norm(attention.q_proj(x).unflatten(-1, shape)), rope).transpose(1, 2)  # B H T D
        k = rotate(attention.k_norm(attention.k_proj(x).unflatten(-1, shape)), rope).transpose(1, 2)  # B K T D
        logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(attention.head_dim)
        largest = max(largest, float(logits.tril().abs().max()))

    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    hooks = [attention.register_forward_pre_hook(record) for attention in attentions]
    model.eval()(tokens)
    for hook in hooks:
        hook.remove()
    return largest


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """The runs, and the largest attention logits of those that did not diverge."""
    measured, grid = make_runs(protocol, lab), make_grid(protocol, lab)
    for arm, (config, _) in grid.settings.items():
        tokens = next(evaluation_batches(grid.data.val.tokens, config.context, 4))[0]
        for row in Runs(measured["runs"]).where(**dict(arm.factors), diverged=False).rows:
            model = load_pretrained(grid.checkpoint(Cell(arm, row["lr"], row["seed"])), "cpu")[0]
            row["largest_logit"] = largest_logit(model, tokens)
    return measured


def stable_range(measured: Measured, qk_norm: str) -> dict[int, float]:
    """By seed, the largest stable rate over the smallest; 1 if all runs diverged."""
    runs = Runs(measured["runs"]).where(qk_norm=qk_norm)
    ranges = {}
    for seed in {row["seed"] for row in runs.rows}:
        done = runs.where(seed=seed, diverged=False).rows
        best = min((row["val_loss"] for row in done), default=math.inf)
        stable = [row["lr"] for row in done if row["val_loss"] < best + WORSE]
        ranges[seed] = max(stable) / min(stable) if stable else 1.0
    return ranges


def judge(measured: Measured) -> Judgment:
    without, with_norm = (stable_range(measured, qk_norm) for qk_norm in ("none", "head"))
    ratios = [math.log(with_norm[seed] / without[seed]) for seed in sorted(without)]
    middle, margin, p = mean(ratios), math.log(FACTOR), sign_flip_p(ratios)
    ours = f"the range is {math.exp(middle):.1f} times as wide (n = {len(ratios)})"
    if p < ALPHA:
        return Judgment(CONFIRMED if middle > 0 else REFUTED, ours, "wider" if middle > 0 else "narrower", p)
    inside = max(sign_flip_p([ratio - margin for ratio in ratios]), sign_flip_p([ratio + margin for ratio in ratios]))
    if inside < ALPHA and abs(middle) < margin:
        return Judgment(REFUTED, ours, f"the ranges are equal within a factor of {FACTOR}", inside)
    return Judgment(OPEN, ours, "the ranges may be equal", p)


def plot(measured: Measured) -> Figure:
    """Final loss, and the largest attention logit, against the learning rate. A cross at the top: diverged."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    runs = Runs(measured["runs"])
    titles = {"val_loss": "validation loss (nats per token)", "largest_logit": "largest attention logit"}
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for number, arm in enumerate(ARMS):
            mine = runs.where(**arm)
            lrs = sorted({row["lr"] for row in mine.rows})
            complete = [lr for lr in lrs if not mine.where(lr=lr).diverged]
            means = [mean(row[name] for row in mine.where(lr=lr).rows) for lr in complete]
            axes.plot(complete, means, "o-", color=f"C{number}", label=f"QK-norm {arm['qk_norm']}")
            lost = [lr for lr in lrs if lr not in complete]
            axes.plot(lost, [0.97] * len(lost), "x", color=f"C{number}", transform=axes.get_xaxis_transform())
        axes.set(xscale="log", xlabel="learning rate", ylabel=title)
        axes.legend()
    return figure


CLAIM = Claim(
    number=11,
    name="qk-norm-rates",
    statement="QK-norm widens the range of stable learning rates",
    source="Small-scale proxies for large-scale Transformer training instabilities, arXiv 2309.14322",
    published="no single figure",
    rule=f"By seed, the largest learning rate over the smallest whose loss is within {WORSE} nats of the best. "
    "Confirmed if this range is wider with QK-norm per head (exact sign-flip test of the logarithm of the ratio, p < "
    f"0.05), refuted if narrower, or equal within a factor of {FACTOR} (the same test against either bound).",
    protocols={"gpu": Protocol(minutes=1120, flags=GPU_RUN, arms=ARMS, lrs=LRS, select_lr=False, seeds=8)},
    measure=measure,
    judge=judge,
    plot=plot,
)
