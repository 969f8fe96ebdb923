"""How the cost of a training step grows with width, depth, context and batch size: `python bench.py growth`."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

from config import DEVICES, ModelConfig, TrainConfig, option
from experiments.benchmarks import Report, RoundsConfig, measure_step

SHAPE = {"dim": 256, "layers": 4, "context": 256, "batch_size": 16}
AXES = {
    "dim": [64, 128, 256, 512, 1024],
    "layers": [1, 2, 4, 8, 16],
    "context": [64, 128, 256, 512, 1024],
    "batch_size": [4, 8, 16, 32, 64],
}


@dataclass(frozen=True, kw_only=True)
class GrowthConfig(RoundsConfig):
    """Options of `growth`."""

    rounds: int = option(3, "measured rounds")
    device: str = option("auto", DEVICES, metavar="DEVICE")


def bench_growth(config: GrowthConfig, device: torch.device) -> Report:
    """Measure a training step against width, depth, context and batch size, compared with a prediction."""
    rows = []
    for axis, values in AXES.items():
        measured = {}
        for value in values:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:  # whose peak memory is its own
                measured[value] = process.submit(measure, SHAPE | {axis: value}, device, config.rounds).result()
        rows += compare(axis, measured)
    return {"shape": SHAPE, "rows": rows}


def compare(axis: str, measured: dict[int, dict[str, float]]) -> list[dict[str, Any]]:
    """The cost of `SHAPE` with each value of `axis`, and what it would be by that of `SHAPE` itself.

    Time grows with the FLOPs. Memory is four numbers per weight (itself, its gradient, two moments) and activations in
    proportion to tokens × blocks × width.
    """
    base, rows = measured[SHAPE[axis]], []
    for value, cost in measured.items():
        speed = base["speed"] * base["flops_per_token"] / cost["flops_per_token"]
        activations = (base["memory"] - base["weights"]) * cost["activations"] / base["activations"]
        row: dict[str, Any] = {"axis": axis, "value": value}
        row |= {"tokens/s": round(cost["speed"]), "predicted tokens/s": round(speed)}
        row |= {"MB": round(cost["memory"] / 1e6), "predicted MB": round((cost["weights"] + activations) / 1e6)}
        rows.append(row)
    return rows


def measure(shape: dict[str, int], device: torch.device, rounds: int) -> dict[str, float]:
    dim, layers, context, batch_size = shape.values()
    model = ModelConfig(dim=dim, layers=layers, heads=max(1, dim // 64), context=context)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cost = measure_step(model, TrainConfig(batch_size=batch_size, optimizer="adamw"), device, dtype, rounds)
    return cost | {"weights": 4 * 4 * model.weights, "activations": batch_size * context * layers * dim}
