"""Without the kernels, nothing in this folder is collected, and a line at the end of the run says why."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from runtime.acceleration import unavailable

reason = unavailable()
collect_ignore_glob = ["test_*.py"] if reason else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if reason:
        terminalreporter.write_line(f"tests/fast not run: {reason}")


@pytest.fixture
def same_bits_on_any_threads() -> Iterator[Callable[[Callable], None]]:
    """Asserts that a function returns the same tensors with one, two and three threads."""
    before = torch.get_num_threads()

    def check(function: Callable) -> None:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(function())
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))

    yield check
    torch.set_num_threads(before)
