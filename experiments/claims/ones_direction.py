"""Claim 14. Without centering, hidden states still end up nearly orthogonal to the vector of ones."""

import math
from statistics import mean

import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.batches import evaluation_batches
from experiments.ablation.grid import Cell
from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.runs import CPU_LRS, CPU_RUN, GPU_LRS, GPU_RUN, Runs, make_grid, make_runs
from experiments.statistics import estimate
from model import Llama
from runtime.checkpoint import load_pretrained

FACTOR = 1.5  # times 1/√d still counts as nearly orthogonal
ARMS = ({"norm": "rmsnorm", "placement": "pre"},)
SEQUENCES = 32


@torch.inference_mode()
def cosines(model: Llama, tokens: Tensor) -> list[float]:
    """Root mean square over tokens of cos(h, 1), for the residual stream before and after every block."""
    streams: list[Tensor] = []
    hooks = [model.layers[0].register_forward_pre_hook(lambda block, args: streams.append(args[0]))]
    hooks += [layer.register_forward_hook(lambda block, args, out: streams.append(out)) for layer in model.layers]
    model.eval()(tokens)
    for hook in hooks:
        hook.remove()
    dim = model.config.dim
    return [float((h.sum(-1) / h.norm(dim=-1) / math.sqrt(dim)).square().mean().sqrt()) for h in streams]


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """The runs, and by seed the cosines at initialization and after training."""
    measured, grid = make_runs(protocol, lab), make_grid(protocol, lab)
    (arm,) = grid.settings
    config = grid.settings[arm][0]
    tokens = next(evaluation_batches(grid.data.val.tokens, config.context, SEQUENCES))[0]
    lr = Runs(measured["runs"]).lr
    start = {seed: cosines(Llama(config, seed), tokens) for seed in range(protocol.seeds)}
    end = {
        seed: cosines(load_pretrained(grid.checkpoint(Cell(arm, lr, seed)), "cpu")[0], tokens)
        for seed in range(protocol.seeds)
    }
    return measured | {"dim": config.dim, "start": list(start.values()), "end": list(end.values())}


def judge(measured: Measured) -> Judgment:
    random = 1 / math.sqrt(measured["dim"])
    start, found = (estimate([mean(blocks) / random for blocks in measured[when]]) for when in ("start", "end"))
    p = estimate([mean(blocks) / random - FACTOR for blocks in measured["end"]]).p
    ours = f"{found:.2f} times 1/√d after training (n = {found.n}), {start.mean:.2f} at initialization"
    if found.high < FACTOR:
        return Judgment(CONFIRMED, ours, f"below {FACTOR} times the cosine of a random direction", p)
    if found.low > FACTOR:
        return Judgment(REFUTED, ours, f"above {FACTOR} times the cosine of a random direction", p)
    return Judgment(OPEN, ours, f"the interval contains {FACTOR}", p)


def plot(measured: Measured) -> Figure:
    """The cosine over depth, a line per seed, at the start and after training."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for when, color in (("start", "0.6"), ("end", "C0")):
        for number, blocks in enumerate(measured[when]):
            axes.plot(range(len(blocks)), blocks, ".-", color=color, label=None if number else f"{when} of training")
    axes.axhline(1 / math.sqrt(measured["dim"]), color="0.3", linewidth=1, linestyle="--", label="1/√d")
    axes.set(
        xticks=range(len(measured["end"][0])),
        xlabel="block (0: the embedding)",
        ylabel="RMS of cos(h, 1)",
        ylim=(0, None),
    )
    axes.legend()
    return figure


CLAIM = Claim(
    number=14,
    name="ones-direction",
    statement="Without centering, hidden states still end up nearly orthogonal to the vector of ones",
    source="arXiv 2409.12951",
    published="orthogonal without being told to",
    rule="RMSNorm, pre-norm, at its best learning rate. The root mean square over tokens of the cosine between the "
    "residual stream and the vector of ones, averaged over depth, over 1/√d, which random directions have. Confirmed "
    f"if its 95% interval over seeds lies below {FACTOR}, refuted if above.",
    protocols={
        "cpu": Protocol(minutes=6, flags=CPU_RUN, arms=ARMS, lrs=CPU_LRS),
        "gpu": Protocol(minutes=150, flags=GPU_RUN, arms=ARMS, lrs=GPU_LRS),
    },
    measure=measure,
    judge=judge,
    plot=plot,
)
