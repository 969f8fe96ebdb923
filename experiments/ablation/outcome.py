"""An arm of a comparison, and the outcome of one of its runs."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from config import FIELDS, RECIPES, check_fields
from files import require
from runtime.flags import read_pairs, read_value

BySeed = Mapping[int, float]
SIZE = "size"  # the factor of --ladder: "dim=64,heads=4,steps=400"


@dataclass(frozen=True)
class Arm:
    """A value for each factor, in the order of the report's columns. A norm may have arguments: `dyt:alpha=0.8`."""

    factors: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, **factors: str) -> "Arm":
        """`Arm.of(norm="dyt:alpha=0.8", placement="pre", batch_size="4")`."""
        return cls(tuple(factors.items()))

    @property
    def name(self) -> str:
        """The norm, the placement, the recipe, and other factors with their names."""
        named = ("norm", "placement", "recipe", "run", SIZE)
        return " ".join(value if name in named else f"{name}={value}" for name, value in self.factors) or "model"

    @property
    def size(self) -> str:
        """Its size in a ladder, or ""."""
        return dict(self.factors).get(SIZE, "")

    @property
    def width(self) -> str:
        """The first part of its size, such as "dim=64", or ""."""
        return self.size.split(",")[0]

    @property
    def without_size(self) -> "Arm":
        return Arm(tuple(factor for factor in self.factors if factor[0] != SIZE))

    @property
    def asked(self) -> dict[str, Any]:
        """What it asks of `train.py`. Raises ValueError for a value of another type."""
        types = {"recipe": str} | {name: each.type for name, each in FIELDS.items()}
        asked = {name: read_value(text, types[name]) for name, text in self.without_size.factors}
        asked |= read_pairs("--ladder", filter(None, self.size.split(",")))
        for name in ("norm", "placement"):
            if name in asked:
                asked[name], _, arguments = asked[name].partition(":")
                asked[f"{name}_args"] = read_pairs(f"--{name}s", filter(None, arguments.split(",")))
        check_fields(asked, "--factor", {"recipe": str})
        recipe = asked.get("recipe", "llama")
        require(recipe in RECIPES, f"--factor recipe: unknown {recipe!r}; choose from {', '.join(RECIPES)}")
        return asked


@dataclass(frozen=True)
class Outcome:
    """The result of one run so far.

    A run diverged if its loss or a gradient was not finite at `step`, or if its final loss is above that of a uniform
    prediction. Final losses are None if the last step was not evaluated.
    """

    arm: Arm
    lr: float
    seed: int
    diverged: bool
    step: int
    val_loss: float | None  # nats per token
    val_bpb: float | None  # bits per UTF-8 byte
    best_val_loss: float | None  # the lowest of all evaluations
    tokens_per_second: float | None  # median over the run
    seconds: float | None
    log: list[dict[str, Any]]  # the rows of its metrics.jsonl

    @property
    def ended(self) -> bool:
        return self.diverged or self.val_loss is not None

    @property
    def row(self) -> dict[str, Any]:
        """Its row in `runs.csv`."""
        values = {name: value for name, value in vars(self).items() if name not in ("arm", "log")}
        return {"arm": self.arm.name} | dict(self.arm.factors) | values

    def __str__(self) -> str:
        result = f"diverged at step {self.step}" if self.diverged else f"val_bpb {self.val_bpb:.4f}"
        return f"{self.arm.name}, lr {self.lr:g}, seed {self.seed}: {result}"


def read_outcome(arm: Arm, lr: float, seed: int, log: list[dict[str, Any]], steps: int, vocab_size: int) -> Outcome:
    """The outcome of a run of `steps` steps, from the rows of its metrics.jsonl."""
    last = log[-1] if log else {"step": 0}
    final = last if last["step"] == steps else {}
    training = [row for row in log if "train_loss" in row]
    return Outcome(
        arm,
        lr,
        seed,
        diverged="not_finite" in last or final.get("val_loss", 0.0) > math.log(vocab_size),
        step=last["step"],
        val_loss=final.get("val_loss"),
        val_bpb=final.get("val_bpb"),
        best_val_loss=min((row["val_loss"] for row in log if "val_loss" in row), default=None),
        tokens_per_second=median(row["tokens_per_second"] for row in training) if training else None,
        seconds=training[-1]["seconds"] if training else None,
        log=log,
    )


def final_bpb(runs: Iterable[Outcome]) -> dict[int, float]:
    """val_bpb by seed, of the runs that did not diverge."""
    return {run.seed: run.val_bpb for run in runs if not run.diverged and run.val_bpb is not None}


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """The second of each pair, by the first."""
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
