"""How the cost of a training step grows with width, depth, context and batch size: `python bench.py growth`."""

import dataclasses
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from config import option
from experiments.benchmarks import (
    BenchConfig,
    Report,
    StepConfig,
    format_settings,
    make_step,
    model_dtypes,
    time_alternately,
)
from model import Llama
from runtime.device import peak_memory
from runtime.report import save_plot
from train import flops_per_token

AXES = {
    "dim": [64, 128, 256, 512, 1024],
    "layers": [1, 2, 4, 8, 16],
    "context": [64, 128, 256, 512, 1024],
    "batch_size": [4, 8, 16, 32, 64],
}
LABELS = {"dim": "width", "layers": "blocks", "context": "context in tokens", "batch_size": "sequences per batch"}


@dataclass(frozen=True, kw_only=True)
class GrowthConfig(BenchConfig):
    """Options of `growth`."""

    rounds: int = option(3, "measured rounds")
    plot: str = option("runs/growth.png", "file for the plot", metavar="FILE")


@dataclass(frozen=True)
class Cost:
    """The measured cost of one shape, and the quantities that predict it."""

    axis: str
    value: int
    tokens_per_second: float
    memory: float  # bytes: weights, their gradients and moments, activations
    flops_per_token: float
    weight_bytes: float  # with gradients and two moments
    activations: float  # tokens × blocks × width; proportional to their memory


def bench_growth(config: GrowthConfig, device: torch.device) -> Report:
    """Measure a plain step against width, depth, context and batch size, compared with a prediction; with a plot."""
    base = StepConfig(
        dim=256,
        layers=4,
        heads=4,
        hidden_dim=704,
        vocab_size=2048,
        batch_size=16,
        rounds=config.rounds,
        device=str(device),
    )
    costs = measure_costs(base)
    plot_costs(costs, base, Path(config.plot))
    rows = []
    for cost in costs:
        speed, memory = predict(cost, base_cost(costs, cost.axis, base))
        rows.append(
            {
                "axis": f"{cost.axis} {cost.value}",
                "tokens/s": round(cost.tokens_per_second),
                "predicted tokens/s": round(speed),
                "MB": round(cost.memory / 1e6),
                "predicted MB": round(memory / 1e6),
            }
        )
    return {"settings": format_settings(base), "plot": config.plot, "rows": rows}


def measure_costs(base: StepConfig) -> list[Cost]:
    """Vary the shape `base` along one axis at a time. Each runs in a new process, whose peak memory is its own."""
    costs = []
    for axis, values in AXES.items():
        for value in values:
            changes: dict[str, Any] = {axis: value}
            if axis == "dim":
                changes |= {"heads": max(1, value // 64), "hidden_dim": value * 11 // 4}
            config = dataclasses.replace(base, **changes)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                costs.append(process.submit(measure_cost, axis, value, config).result())
    return costs


def measure_cost(axis: str, value: int, config: StepConfig) -> Cost:
    device = torch.device(config.device)
    before = peak_memory(device)
    model = Llama(config.model_config()).to(device)
    step = make_step(model, config, model_dtypes(device)[0])
    seconds = time_alternately({"step": step}, config.rounds, device)["step"]
    tokens = config.batch_size * config.context
    return Cost(
        axis,
        value,
        tokens_per_second=tokens / seconds,
        memory=peak_memory(device) - before,
        flops_per_token=flops_per_token(model),
        weight_bytes=4 * sum(weight.nbytes for weight in model.parameters()),
        activations=tokens * config.layers * config.dim,
    )


def base_cost(costs: list[Cost], axis: str, base: StepConfig) -> Cost:
    """The cost of the shape `base`, as measured along `axis`."""
    return next(cost for cost in costs if (cost.axis, cost.value) == (axis, getattr(base, axis)))


def predict(cost: Cost, base: Cost) -> tuple[float, float]:
    """Tokens/s and bytes, extrapolated from `base`.

    Time grows with the FLOPs. Memory is that of the weights plus activations in proportion to tokens × blocks × width.
    """
    activations = (base.memory - base.weight_bytes) * cost.activations / base.activations
    return base.tokens_per_second * base.flops_per_token / cost.flops_per_token, cost.weight_bytes + activations


def plot_costs(costs: list[Cost], base: StepConfig, path: Path) -> None:
    """A column per axis: tokens/s above, memory below; the prediction is dashed."""
    figure = Figure(figsize=(14, 6), layout="constrained")
    panels = figure.subplots(2, len(AXES), sharex="col", sharey="row")
    for column, axis in enumerate(AXES):
        on_axis = [cost for cost in costs if cost.axis == axis]
        values = [cost.value for cost in on_axis]
        predicted = [predict(cost, base_cost(costs, axis, base)) for cost in on_axis]
        measured_and_predicted = [
            ([cost.tokens_per_second for cost in on_axis], [speed for speed, _ in predicted]),
            ([cost.memory / 1e6 for cost in on_axis], [memory / 1e6 for _, memory in predicted]),
        ]
        for panel, (measured, expected) in zip(panels[:, column], measured_and_predicted, strict=True):
            panel.loglog(values, measured, "o-", label="measured")
            panel.loglog(values, expected, "--", color="0.4", label="predicted")
            panel.grid(alpha=0.3, which="both")
            panel.set_xticks(values, [str(value) for value in values])
            panel.minorticks_off()
        panels[1, column].set_xlabel(LABELS[axis])
    panels[0, 0].set_ylabel("tokens/s")
    panels[1, 0].set_ylabel("memory of a step, MB")
    panels[0, 0].legend()
    save_plot(figure, path)
