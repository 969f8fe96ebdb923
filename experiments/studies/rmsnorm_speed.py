"""Is a training step with RMSNorm faster than one with LayerNorm by at least 7%?"""

import math
from itertools import product

import torch

from config import TrainConfig
from experiments.benchmarks import time_alternately, training_step
from experiments.studies.study import Protocol, Row, Study, difference
from model import Llama


def step_times(protocol: Protocol, seeds: range) -> list[Row]:
    """ln of the seconds of a training step: for each seed the median of ten steps, which all arms take in turn."""
    torch.set_num_threads(1)
    steps = {}
    for norm, compiled in product(("rmsnorm", "layernorm"), (False, True)):
        model = Llama(norm=norm, vocab_size=257)  # the default width of 128 and context of 256
        name = f"{norm}, compiled" if compiled else norm
        steps[name] = training_step(model, TrainConfig(compile=compiled), torch.float32)
    rows = []
    for seed in seeds:
        for arm, seconds in time_alternately(steps, 10, torch.device("cpu")).items():
            rows.append({"arm": arm, "seed": seed, "value": math.log(seconds)})
    return rows


STUDY = Study(
    "rmsnorm-speed",
    [
        difference("rmsnorm", "layernorm", ratio=True, reproduced=(-math.inf, math.log(0.93))),
        difference("rmsnorm, compiled", "layernorm, compiled", ratio=True),
    ],
    {"M": Protocol(10)},
    measure=step_times,
    unit="ln(time with RMSNorm / with LayerNorm)",
)
