"""All tests run on one thread: their tensors are small."""

from collections.abc import Callable, Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def for_each_thread_count() -> Iterator[Callable]:
    """Call a function with one, two and three threads and return the three results."""

    def call(function: Callable) -> list:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(function())
        return results

    yield call
    torch.set_num_threads(1)
