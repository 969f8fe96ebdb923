"""How the cost of a training step grows with width, depth, context and batch: `python bench.py growth`."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

STEPS = {"dim": [64, 128, 256, 512, 1024], "layers": [1, 2, 4, 8, 16], "context": [64, 128, 256, 512, 1024]}
STEPS["batch_size"] = [4, 8, 16, 32, 64]
LABELS = {"dim": "width", "layers": "blocks", "context": "context in tokens", "batch_size": "sequences in a batch"}


@dataclass(frozen=True)
class Cost:
    """What one shape costs, and what decides that in theory."""

    axis: str
    value: int
    tokens_per_second: float
    memory: float  # bytes of a step: weights, their gradients and moments, activations
    flops_per_token: float
    weight_bytes: float
    activations: float  # in no unit: tokens × blocks × width


def measure(base: Any, step_cost: Callable[[Any], tuple[float, ...]]) -> list[Cost]:
    """Costs around the shape `base`, one axis at a time; each in a process of its own, whose peak of memory counts."""
    costs = []
    for axis, values in STEPS.items():
        for value in values:
            config = dataclasses.replace(base, **{axis: value})
            if axis == "dim":
                config = dataclasses.replace(config, heads=max(1, value // 64), hidden_dim=value * 11 // 4)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                costs.append(Cost(axis, value, *alone.submit(step_cost, config).result()))
    return costs


def in_theory(cost: Cost, base: Cost) -> tuple[float, float]:
    """Tokens/s and bytes, from those of `base`: by the arithmetic, and by weights as they are and activations as a
    product of tokens, blocks and width.
    """
    activations = (base.memory - base.weight_bytes) * cost.activations / base.activations
    return base.tokens_per_second * base.flops_per_token / cost.flops_per_token, cost.weight_bytes + activations


def plot(costs: list[Cost], base: Any, path: Path) -> None:
    """A column for each axis; above tokens/s, below memory; theory dashed, from the shape that all axes share."""
    figure = Figure(figsize=(14, 6), layout="constrained")
    panels = figure.subplots(2, len(STEPS), sharex="col", sharey="row")
    for column, axis in enumerate(STEPS):
        there = [cost for cost in costs if cost.axis == axis]
        middle = next(cost for cost in there if cost.value == getattr(base, axis))
        values = [cost.value for cost in there]
        theory = [in_theory(cost, middle) for cost in there]
        measured = ([cost.tokens_per_second for cost in there], [cost.memory / 1e6 for cost in there])
        for panel, seen, expected in zip(
            panels[:, column], measured, ([t[0] for t in theory], [t[1] / 1e6 for t in theory]), strict=True
        ):
            panel.loglog(values, seen, "o-", label="measured")
            panel.loglog(values, expected, "--", color="0.4", label="theory")
            panel.grid(alpha=0.3, which="both")
            panel.set_xticks(values, [str(value) for value in values])
            panel.minorticks_off()
        panels[1, column].set_xlabel(LABELS[axis])
    panels[0, 0].set_ylabel("tokens/s")
    panels[1, 0].set_ylabel("memory of a step, MB")
    panels[0, 0].legend()
    figure.savefig(path, dpi=120)
