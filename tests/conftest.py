"""For all tests: one thread, because their tensors are small."""

from collections.abc import Callable, Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def for_each_thread_count() -> Iterator[Callable]:
    """Calls a function with one, two and three threads, and returns the results."""

    def results(function: Callable) -> list:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(function())
        return found

    yield results
    torch.set_num_threads(1)
