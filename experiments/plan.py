"""Memory and speed of every preset on paper: `python bench.py plan`. No GPU is needed; see `runtime/plan.py`."""

from dataclasses import dataclass
from typing import Any

import torch

import train
from config import PRESETS, option
from experiments.benchmarks import Report
from runtime.device import CARDS

VARIANTS = {
    "plain": "--ranks 1 --no-shard --no-recompute",
    "recompute": "--ranks 1 --no-shard --recompute",
    "shard": "--ranks 8 --shard --no-recompute",
    "shard, recompute": "--ranks 8 --shard --recompute",
}
GIB = 2**30


@dataclass(frozen=True)
class PlanConfig:
    """Options of `plan`."""

    card: str = option("h100", "GPU, as in train.py --plan", choices=list(CARDS))
    device: str = option("cpu", "where the plan is made", choices=["cpu"])
    out: str = option("", "JSON file for the report (default: bench-plan.json under runs/)", metavar="FILE")


def bench_plan(config: PlanConfig, device: torch.device) -> Report:
    """Plan a training step of every preset, as train.py --plan does: plain, with --recompute, and sharded."""
    return {
        "card": CARDS[config.card].name,
        "memory": "GiB per rank at the peak, simulated; shard: FSDP2 on 8 ranks, else one rank",
        "gradients": "at the moment of the peak",
        "MFU": "roofline, an upper bound: data at the card's bandwidth, matrix products at its peak, no communication",
        "compiled": "an estimate: everything between two matrix products is one kernel",
        "rows": [row(preset, variant, config.card) for preset in PRESETS for variant in VARIANTS],
    }


def row(preset: str, variant: str, card: str) -> dict[str, Any]:
    plan = train.plan(train.parse(["--plan", "--preset", preset, "--card", card, *VARIANTS[variant].split()]))
    return {
        "preset": preset,
        "variant": variant,
        "parameters": plan.parameters,
        "ranks": plan.ranks,
        "micro-batch": plan.micro_batch_size,
        "memory": plan.memory / GIB,
        "weights": plan.weights / GIB,
        "gradients": plan.gradients / GIB,
        "optimizer": plan.optimizer_state / GIB,
        "gathered": plan.gathered / GIB,
        "activations": plan.activations / GIB,
        "fits": plan.memory < CARDS[card].memory,
        "launches": plan.launches,
        "eager s": plan.eager_seconds,
        "eager tokens/s": round(plan.tokens_per_second(plan.eager_seconds)),
        "eager MFU": plan.mfu(plan.eager_seconds),
        "compiled s": plan.compiled_seconds,
        "compiled tokens/s": round(plan.tokens_per_second(plan.compiled_seconds)),
        "compiled MFU": plan.mfu(plan.compiled_seconds),
    }
