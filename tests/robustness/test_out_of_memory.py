"""Memory that runs out, forced by a limit on the address space: exit code 3, what to change, nothing damaged."""

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import generate
import train
from runtime.checkpoint import list_checkpoints, verify

resource = pytest.importorskip("resource")  # missing on Windows
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets a limit that Linux enforces"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # it has threads, of which none is needed
]
LARGE = 1 << 18  # bytes: what is larger cannot be allocated
FLAGS = "--dim 64 --context 64 --batch-size 16 --optimizer adamw --eval-tokens 500 --steps 6 --save-every 3 --keep 9"


def without_memory(owner: Any, name: str, call: int, command: Callable[[list[str]], None], flags: list[str]) -> None:
    """`command(flags)` in which, from this call of a function on, nothing large can be allocated."""
    real, remaining = getattr(owner, name), [call]

    def limited(*args: Any, **kwargs: Any) -> Any:
        remaining[0] -= 1
        if remaining[0] == 0:
            gc.collect()  # what it frees later could be allocated again
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 4 * LARGE, resource.RLIM_INFINITY))
            with suppress(MemoryError):
                limited.blocks = []  # type: ignore[attr-defined]
                while True:  # what is free already
                    limited.blocks.append(bytearray(LARGE))  # type: ignore[attr-defined]
        return real(*args, **kwargs)

    torch.set_num_threads(1)
    setattr(owner, name, limited)
    command(flags)


def test_a_training_step_without_memory(flags, fork, tmp_path):
    """The checkpoint before it is intact."""
    child = fork(without_memory, train.Trainer, "accumulate_gradients", 5, train.main, [*flags, *FLAGS.split()])
    assert child.wait() == 3, child.text
    last = child.text.splitlines()[-1]
    assert last.startswith("error: out of memory; try a smaller --micro-batch-size") and "Traceback" not in child.text
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000003"]
    verify(tmp_path / "run/checkpoints/step-000003")


def test_generating_without_memory(undisturbed, fork):
    options = ["--device", "cpu", "--samples", "512", "--tokens", "30", "--checkpoint", str(undisturbed)]
    child = fork(without_memory, generate, "stream_text", 1, generate.main, options)
    assert child.wait() == 3, child.text
    assert child.text.splitlines()[-1] == "error: out of memory; try a smaller --samples or --tokens"
