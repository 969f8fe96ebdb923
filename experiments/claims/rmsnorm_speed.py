"""Claim 2. RMSNorm is about 10% faster than LayerNorm."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from experiments.benchmarks import DTYPES, StepConfig, compile_norm, forward_backward, make_step, time_alternately
from experiments.claims.claim import Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.initial import with_norms
from experiments.claims.runs import geometric, ratio
from experiments.claims.verdict import Comparison, all_of
from experiments.statistics import estimate
from model import Llama
from norms import build_norm
from norms.numerics import upcast
from runtime.acceleration import accelerate, resolve_fast

FASTER = 0.95  # the largest ratio of times that counts as about 10% faster
Pair = dict[str, Callable]  # the same computation with RMSNorm and with LayerNorm


class PlainLayerNorm(nn.Module):
    """LayerNorm in ordinary operations, as RMSNorm is written: the registered one calls PyTorch's fused kernel."""

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = upcast(x)
        h = h - h.mean(-1, keepdim=True)
        y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight + self.bias).to(x.dtype)


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """Time with RMSNorm over time with LayerNorm: for each comparison, a ratio of medians per group of rounds.

    Within a group the two alternate; from group to group the other one goes first.
    """
    device, settings = torch.device(lab.device), protocol.settings
    torch.set_num_threads(lab.threads)
    ratios: dict[str, list[float]] = {}
    with with_norms({"plain-layernorm": PlainLayerNorm}):
        for kernels in ("plain", "fast", "compiled"):
            if kernels == "fast" and not resolve_fast(None, device):
                continue
            for name, pair in comparisons_with(kernels, settings, device):
                ratios[f"{kernels}, {name}"] = [
                    time_pair(pair, settings["rounds"], device, swap=group % 2 == 1)
                    for group in range(settings["groups"])
                ]
    return {"ratios": ratios}


def comparisons_with(kernels: str, settings: Mapping[str, Any], device: torch.device) -> Iterator[tuple[str, Pair]]:
    """The norm alone, forward and with backward, and the whole training step."""
    dtype = DTYPES[settings["dtype"]]
    kinds = {"rmsnorm": "rmsnorm", "layernorm": "plain-layernorm" if kernels == "plain" else "layernorm"}
    x = torch.randn(settings["rows"], settings["dim"], device=device, dtype=dtype, requires_grad=True)
    grad_y = torch.randn_like(x)
    norms = {name: make_norm(kind, kernels, settings["dim"]).to(device) for name, kind in kinds.items()}
    yield "norm forward", {name: partial(norm, x) for name, norm in norms.items()}
    yield "norm forward + backward", {name: partial(forward_backward, norm, x, grad_y) for name, norm in norms.items()}
    config = StepConfig(**settings["step"], compile=kernels == "compiled")
    steps = {}
    for name, kind in kinds.items():
        model = Llama(replace(config.model_config(), norm=kind)).to(device)
        if kernels == "fast":
            accelerate(model)
        steps[name] = make_step(model, config, dtype)
    yield "training step", steps


def make_norm(kind: str, kernels: str, dim: int) -> nn.Module:
    if kernels == "compiled":
        return compile_norm(kind, dim)
    norm = build_norm(kind, dim)
    return accelerate(norm) if kernels == "fast" else norm


def time_pair(pair: Pair, rounds: int, device: torch.device, swap: bool) -> float:
    seconds = time_alternately(dict(reversed(pair.items())) if swap else pair, rounds, device)
    return seconds["rmsnorm"] / seconds["layernorm"]


def judge(measured: Measured) -> Judgment:
    logarithms = {name: [math.log(value) for value in values] for name, values in measured["ratios"].items()}
    comparisons = [Comparison(name, values, "below", math.log(FASTER)) for name, values in logarithms.items()]
    steps = "; ".join(f"{name} {ratio(estimate(values))}" for name, values in logarithms.items() if "step" in name)
    return all_of(comparisons, f"time relative to LayerNorm: {steps}")


def plot(measured: Measured) -> Figure:
    """The ratio of times of each comparison: a dot per group of rounds, and the mean with its interval."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    for height, values in enumerate(measured["ratios"].values()):
        found = geometric(values)
        middle, low, high = (math.exp(value) for value in (found.mean, found.low, found.high))
        axes.plot(values, [height] * len(values), "o", color="0.6", markersize=4)
        axes.errorbar(
            middle, height, xerr=[[middle - low], [high - middle]], fmt="o", mfc="white", color="C0", capsize=4
        )
    axes.axvline(1, color="0.3", linewidth=1)
    axes.axvline(FASTER, color="0.3", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(measured["ratios"])), list(measured["ratios"]))
    axes.invert_yaxis()
    axes.set_xlabel(f"time with RMSNorm / time with LayerNorm (dashed: {FASTER})")
    axes.grid(axis="x", alpha=0.3)
    return figure


CLAIM = Claim(
    number=2,
    name="rmsnorm-speed",
    statement="RMSNorm is about 10% faster than LayerNorm",
    source="article 002; Root Mean Square Layer Normalization, arXiv 1910.07467; arXiv 2305.14858",
    published="about 10%; 7–64% (1910.07467); 1–10% (2305.14858)",
    rule="Three computations (the norm's forward, its forward and backward, a whole training step), each with plain "
    "operations for both norms, with the kernels of fast/ where they run, and compiled. Each gives a ratio of times, "
    "RMSNorm over LayerNorm with bias: of medians of alternating rounds, in 10 groups of rounds, as logarithms. About "
    f"10% faster is taken as a ratio below {FASTER}. Confirmed if all ratios are below it (t tests, Holm), refuted if "
    "one is above.",
    protocols={
        "cpu": Protocol(
            minutes=8,
            settings={
                "rows": 8192,
                "dim": 768,
                "dtype": "float32",
                "groups": 10,
                "rounds": 5,
                "step": {
                    "dim": 256,
                    "layers": 4,
                    "heads": 4,
                    "hidden_dim": 704,
                    "vocab_size": 2048,
                    "context": 128,
                    "batch_size": 4,
                },
            },
        ),
        "gpu": Protocol(
            minutes=5,
            settings={
                "rows": 65536,
                "dim": 768,
                "dtype": "bfloat16",
                "groups": 10,
                "rounds": 15,
                "step": {
                    "dim": 768,
                    "layers": 12,
                    "heads": 12,
                    "hidden_dim": 2048,
                    "vocab_size": 32000,
                    "context": 1024,
                    "batch_size": 8,
                },
            },
        ),
    },
    measure=measure,
    judge=judge,
    plot=plot,
)
