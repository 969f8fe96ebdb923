"""For all tests: one thread, since theirs are small tensors, on which more threads only wait for each other."""

import platform
from collections.abc import Callable, Iterator

import pytest
import torch

import native

torch.set_num_threads(1)


@pytest.fixture
def each_number_of_threads() -> Iterator[Callable]:
    """Calls a function with one, two and three threads, and returns the results."""

    def results(function: Callable) -> list:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(function())
        return found

    yield results
    torch.set_num_threads(1)


@pytest.fixture
def without_avx512(monkeypatch) -> Iterator[None]:
    """C files as they are built for most processors."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("this processor has other instructions")
    for flags in ([*native.FLAGS, "-mno-avx512f"], native.FLAGS):
        monkeypatch.setattr(native, "FLAGS", flags)
        native.library.cache_clear()
        native.function.cache_clear()
        if flags[-1] == "-mno-avx512f":
            yield
