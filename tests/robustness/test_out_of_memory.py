"""Memory that runs out, forced by a limit on the address space: exit code 3, what to change, nothing damaged."""

import random
import sys
from pathlib import Path

import pytest

from runtime.checkpoint import list_checkpoints, verify

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets a limit that Linux enforces")

# Run in a process of its own: the N-th call of a function may allocate only so many bytes.
LIMITED = """
import resource, sys
from pathlib import Path

sys.path.insert(0, {root!r})
import torch
import generate, train
from runtime import checkpoint

owner, name, calls, slack = {owner}, {name!r}, {call}, {slack}
real = getattr(owner, name)

def limited(*args, **kwargs):
    global calls
    calls -= 1
    if calls:
        return real(*args, **kwargs)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + slack, resource.RLIM_INFINITY))
    try:
        return real(*args, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

setattr(owner, name, limited)
{command}.main(sys.argv[1:])
"""
BIG = [
    "--dim",
    "256",
    "--layers",
    "2",
    "--heads",
    "2",
    "--context",
    "256",
    "--batch-size",
    "16",
    "--no-fast",
    "--optimizer",
    "adamw",
]
WHERE = {  # where memory runs out in a run of 6 steps: the function, and the call of it
    "a training step": ("train.Trainer", "update", (1, 5)),
    "an evaluation": ("train", "evaluate", (1, 2)),
    "saving": ("checkpoint", "save_tensors", (1, 2)),
    "the model": ("train", "Llama", (1, 1)),
}


def limited(owner: str, name: str, call: int, slack: int, command: str) -> str:
    return LIMITED.format(root=str(ROOT), owner=owner, name=name, call=call, slack=slack, command=command)


def test_training_that_runs_out_of_memory(cases, record, flags, tmp_path, start):
    draw, ended = random.Random(0), {where: 0 for where in WHERE}
    for number in range(cases(2, 24)):
        where = list(WHERE)[number % len(WHERE)]
        owner, name, calls = WHERE[where]
        slack, run = draw.choice([1 << 16, 1 << 20, 3 << 20]), tmp_path / str(number)
        script = limited(owner, name, draw.randint(*calls), slack, "train")
        steps = ["--steps", "6", "--save-every", "3", "--eval-every", "4", "--eval-tokens", "4096", "--keep", "9"]
        process = start("-c", script, *flags, *BIG, *steps, "--out", run, limited=True)
        _, error = process.communicate(timeout=300)
        last = error.splitlines()[-1]
        case = f"{where}, {slack} bytes: {process.returncode} {error[-2000:]}"
        assert process.returncode == 3, case
        assert last.startswith("error: out of memory") and "--micro-batch-size" in last and "Traceback" not in error
        assert not list(run.glob("checkpoints/.*")), case
        for checkpoint in list_checkpoints(run):
            verify(checkpoint)
        ended[where] += 1
    record(exit_code_3_and_checkpoints_intact=ended)
