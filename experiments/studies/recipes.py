"""Flags, arms and models that several studies share.

Scale S has 0.23 million parameters and sees 1.02 million tokens, M has 0.84 and sees 2.05 million. Tokens are bytes, so
losses are in nats per byte. Most studies are judged with Muon: between seeds, its losses vary less than AdamW's.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from experiments.studies.study import Protocol, Runs
from model import Llama

TINY = (
    "--tokenizer bytes --layers 4 --heads 2 --batch-size 8 --dtype float32 --no-compile --schedule linear --steps 1000 "
    "--eval-every 1000 --eval-tokens 131072 --save-every 1000 --keep 1"
)
S = f"{TINY} --dim 64 --context 128"
M = f"{TINY} --dim 128 --context 256"
# 14 million parameters, 65 million tokens of 8,192 kinds.
GPU = "--preset small --dropout 0 --dtype bfloat16 --compile --steps 2000 --eval-every 2000 --save-every 2000 --keep 1"
LRS = {"muon": 0.016, "adamw": 0.005}  # where searches start
SQUASHED = {"init": "xavier", "scaled_embedding": "true"}  # for DyT and Derf, which do not rescale what they get


def tuned(optimizer: str, data: str = "python", **factors: str) -> Runs:
    return Runs({"optimizer": optimizer, **factors}, LRS[optimizer], data=data)


def both(name: str, **factors: str) -> dict[str, Runs]:
    """An arm with Muon, and with AdamW."""
    return {name: tuned("muon", **factors), f"{name}, AdamW": tuned("adamw", **factors)}


def with_gpu(protocols: dict[str, Protocol]) -> dict[str, Protocol]:
    """And the scale "gpu", which runs only if asked for. It has the arms and seeds of the first scale."""
    return protocols | {"gpu": replace(next(iter(protocols.values())), flags=GPU)}


RMSNORM = both("RMSNorm")


def new_model(seed: int, **options: Any) -> tuple[Llama, Tensor, Tensor]:
    """A model of width 64, and a batch of random tokens: inputs and targets."""
    model = Llama(seed=seed, dim=64, heads=2, context=64, vocab_size=257, **options)
    ids = torch.randint(257, (8, 65), generator=torch.Generator().manual_seed(seed))
    return model, ids[:, :-1], ids[:, 1:]
