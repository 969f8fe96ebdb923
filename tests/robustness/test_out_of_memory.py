"""Memory that runs out, forced by a limit on the address space: exit code 3, what to change, nothing damaged."""

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import generate
import train
from runtime import checkpoint
from runtime.checkpoint import list_checkpoints, verify

try:
    import resource
except ImportError:  # missing on Windows
    resource = None  # type: ignore[assignment]

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets a limit that Linux enforces")

LARGE = 1 << 18  # bytes: what is larger cannot be allocated
FLAGS = (
    "--dim 64 --context 64 --batch-size 16 --no-fast --optimizer adamw --eval-tokens 500 --steps 6 --save-every 3 "
    "--eval-every 4 --keep 9"
)
GENERATE = "--device cpu --no-fast --samples 512 --tokens 40 --checkpoint"
# Where memory runs out: the command, the function, how many calls of it there are, and what is to be changed.
WHERE: dict[str, tuple[Any, Any, str, int, str]] = {
    "saving": (train, checkpoint, "save_tensors", 2, "--micro-batch-size"),
    "generating": (generate, generate.Llama, "next_logits", 1, "--samples or --tokens"),
    "a training step": (train, train.Trainer, "accumulate_gradients", 6, "--micro-batch-size"),
    "an evaluation": (train, train, "evaluate", 2, "--micro-batch-size"),
}


# --- in a process of its own -----------------------------------------------------------------------------------------


@contextmanager
def out_of_memory(owner: Any, name: str, call: int) -> Iterator[None]:
    """In this call of a function, nothing large can be allocated.

    Not inside safetensors, which then ends the process, but after it: in `save_tensors`, too much is asked for.
    """
    real, limits, remaining = getattr(owner, name), resource.getrlimit(resource.RLIMIT_AS), call

    def limited(*args: Any, **kwargs: Any) -> Any:
        nonlocal remaining
        remaining -= 1
        if remaining:
            return real(*args, **kwargs)
        if name == "save_tensors":
            real(*args, **kwargs)
            torch.empty(1 << 55)
        gc.collect()  # what it frees later could be allocated again
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 4 * LARGE, limits[1]))
        blocks = []
        try:
            with suppress(MemoryError):
                while True:  # what is free already
                    blocks.append(bytearray(LARGE))
            return real(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, limited)
        yield


def run_cases(folder: Path, flags: list[str], count: int) -> list[dict[str, Any]]:
    """What each case ended with, and the checkpoints it left."""
    draw, results = random.Random(0), []
    trained = [*flags, *FLAGS.split(), "--out"]
    train.main([*trained, str(folder / "trained"), "--steps", "1"])
    for number in range(count):
        where, (command, owner, name, calls, _) = list(WHERE.items())[number % len(WHERE)]
        call, run, errors, code = draw.randint(1, calls), folder / str(number), StringIO(), 0
        arguments = [*GENERATE.split(), str(folder / "trained")] if command is generate else [*trained, str(run)]
        with out_of_memory(owner, name, call), redirect_stderr(errors):
            try:
                command.main(arguments)
            except SystemExit as exited:
                code = int(exited.code or 0)
        for path in list_checkpoints(run):
            verify(path)
        left = [path.name for path in list_checkpoints(run)]
        unfinished = [path.name for path in (*run.glob("checkpoints/.*"), *run.glob("*.part"))]
        result = {"where": where, "call": call, "code": code, "checkpoints": left, "unfinished": unfinished}
        results.append(result | {"error": errors.getvalue()})
    return results


# --- around it -------------------------------------------------------------------------------------------------------


def test_running_out_of_memory(cases, record, flags, tmp_path):
    """In training, saving, evaluating and generating."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path), str(cases(2, 16)), *flags]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    ended: dict[str, int] = {}
    for case in json.loads(done.stdout.splitlines()[-1]):
        assert case["code"] == 3 and not case["unfinished"], case
        where, call, last = case["where"], case["call"], case["error"].splitlines()[-1]
        assert "out of memory" in last and WHERE[where][-1] in last and "Traceback" not in case["error"], case
        if where in ("a training step", "saving"):
            before = call > (3 if where == "a training step" else 1)
            assert case["checkpoints"] == ["step-000003"][:before], case
        ended[where] = ended.get(where, 0) + 1
    record(exit_code_3_and_checkpoints_intact=ended)


if __name__ == "__main__":
    results = run_cases(Path(sys.argv[1]), sys.argv[3:], int(sys.argv[2]))
    print(json.dumps(results))
