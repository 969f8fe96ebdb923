"""The windows of tokens that a model is trained and evaluated on."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from files import BadInput


def training_batch(
    tokens: np.ndarray,
    seed: int,
    step: int,
    rows: range,
    context: int,
    order: str = "random",
    batch_size: int | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (rows, context): the given rows of a step's global batch.

    order: "random" for windows that each start at a uniformly random token, or "epochs" for adjacent windows in a
        random order, each once an epoch, which needs the `batch_size` of all rows.
    vocab_size: if it is given, BadInput is raised for an id of any row of the batch that is not below it.

    A row depends only on the seed, the step and its index, not on which other rows are requested.
    """
    count = batch_size or rows.stop
    if order == "random":
        draws = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(count)
        starts: np.ndarray = draws % (len(tokens) - context)
    else:
        windows = (len(tokens) - 1) // context
        positions = (divmod(step * count + row, windows) for row in range(count))
        starts = np.array([_order(windows, seed, epoch)[number] for epoch, number in positions], np.int64) * context
    inputs, targets = _windows(tokens, starts, context, vocab_size)
    return inputs[rows.start : rows.stop], targets[rows.start : rows.stop]


def evaluation_batches(
    tokens: np.ndarray, context: int, batch_size: int, max_tokens: int | None = None, vocab_size: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, int64 (up to batch_size, context), from adjacent windows.

    Every token except the first is a target exactly once; the remainder is a final batch of one shorter window. If
    that is more than `max_tokens` targets, only as many full windows as fit are used, at least one, evenly spaced.
    `vocab_size` is that of `training_batch`.
    """
    targets = len(tokens) - 1
    windows, remainder = divmod(targets, context)  # full windows, and the number of targets after them
    used = windows
    if windows and max_tokens is not None and targets > max_tokens:
        used, remainder = max(1, max_tokens // context), 0
    for first in range(0, used, batch_size):
        numbers = np.arange(first, min(first + batch_size, used))
        yield _windows(tokens, numbers * windows // used * context, context, vocab_size)
    if remainder:
        yield _windows(tokens, np.array([windows * context]), remainder, vocab_size)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int, vocab_size: int | None) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (starts, length)."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
    ids = windows[starts].astype(np.int64)  # only these are copied
    wrong = ids[(ids < 0) | (ids >= vocab_size)] if vocab_size else []
    if len(wrong):
        file = getattr(tokens, "filename", "token file")
        raise BadInput(f"{file} has the id {wrong[0]}, but --vocab-size is {vocab_size}")
    return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())


@lru_cache(maxsize=2)  # a batch may be in two epochs
def _order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """A random order of the windows. Ten million of them take 2 s and 40 MB."""
    draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(windows)
    return draws.argsort(kind="stable").astype(np.uint32)
