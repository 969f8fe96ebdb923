"""How long a training step of each arm takes, in turn, at be15de5: run it from the root of the project."""

import statistics
import sys

import torch

sys.path.insert(0, ".")

from config import configure
from experiments.benchmarks import host_seconds, make_step
from machine.device import set_up_cpu

ARMS, ROUNDS = ("llama", "qwen3", "gemma3"), 60
SHARED = {"layers": 4, "context": 128, "batch_size": 8, "tokenizer": "bytes", "lr": 0.008, "optimizer": "muon"}
SHARED |= {"dtype": "float32", "device": "cpu", "compile": False}

set_up_cpu()
torch.set_num_threads(1)
for dim in (64, 96, 128):
    steps, seconds = {}, {arm: list[float]() for arm in ARMS}
    for arm in ARMS:
        model, config = configure({"recipe": arm, "dim": dim, "heads": dim // 32} | SHARED)
        steps[arm] = make_step(model, config)
    for number in range(-3, ROUNDS):
        for arm in ARMS if number % 2 else ARMS[::-1]:
            measured = host_seconds(steps[arm], torch.device("cpu"))
            if number >= 0:
                seconds[arm].append(measured)
    print(f"width {dim}: llama {1e3 * statistics.median(seconds['llama']):.1f} ms")
    for arm in ARMS[1:]:
        ratio = statistics.median(a / b for a, b in zip(seconds[arm], seconds["llama"], strict=True))
        print(f"  {arm}: {ratio:.3f} times as long")
