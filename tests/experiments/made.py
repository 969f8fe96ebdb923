"""Runs that are made up, for tests of what is said about them."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records import Arm, Record

KNOWN: dict[str, str] = {"data": "python@123456789abc", "tokenizer": "bytes@123456789abc"}
KNOWN |= {"dtype": "float32", "steps": "20"}
COSTS = {"parameters": 230_016, "tokens": 512_000, "flops": 8e11, "step_time": 1.0}


def record(arm: Arm, seed: int, bpb: float | None, **values: Any) -> Record:
    """A run of 20 steps at 0.01. With `bpb` None, its loss was not finite at step 7."""
    made: dict[str, Any] = {"lr": 0.01, "settings": KNOWN, "folder": "folder", "diverged": True, "step": 7}
    if bpb is not None:
        made |= {"diverged": False, "step": 20, "val_loss": bpb, "val_bpb": bpb}
    made |= COSTS | values
    return Record(arm, seed=seed, run=f"{arm.name}-lr{made['lr']}-seed{seed}", **made)


def records(bpb: Mapping[Any, Sequence[float | None]], **values: Any) -> list[Record]:
    """The reported runs of arms, which may be named by a norm: a list by seed for each."""
    arms = {(Arm.of(norm=arm) if isinstance(arm, str) else arm): losses for arm, losses in bpb.items()}
    seeds = range(max(map(len, arms.values())))
    pairs = [(seed, arm) for seed in seeds for arm, losses in arms.items() if seed < len(losses)]
    return [record(arm, seed, arms[arm][seed], **values) for seed, arm in pairs]


def search(arm: Arm, losses: Mapping[float, Sequence[float | None]], **values: Any) -> list[Record]:
    """The runs that searched for an arm's learning rate."""
    pairs = [(lr, number, bpb) for lr, each in losses.items() for number, bpb in enumerate(each)]
    return [record(arm, 1000 + number, bpb, lr=lr, search=True, **values) for lr, number, bpb in pairs]
