"""The windows of tokens that a model is trained and evaluated on."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def training_batch(tokens: np.ndarray, seed: int, step: int, rows: range, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (rows, context): the given rows of a step's global batch.

    Each row is a window that starts at a uniformly random token. It depends only on the seed, the step and its row
    index, not on which other rows are requested.
    """
    draws = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(rows.stop)[rows.start :]
    return _windows(tokens, draws % (len(tokens) - context), context)


def evaluation_batches(
    tokens: np.ndarray, context: int, batch_size: int, max_tokens: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, int64 (up to batch_size, context), from adjacent windows.

    Every token except the first is a target exactly once; the remainder is a final batch of one shorter window. If
    that is more than `max_tokens` targets, only as many full windows as fit are used, at least one, evenly spaced.
    """
    targets = len(tokens) - 1
    windows, remainder = divmod(targets, context)  # full windows, and the number of targets after them
    used = windows
    if windows and max_tokens is not None and targets > max_tokens:
        used, remainder = max(1, max_tokens // context), 0
    for first in range(0, used, batch_size):
        numbers = np.arange(first, min(first + batch_size, used))
        yield _windows(tokens, numbers * windows // used * context, context)
    if remainder:
        yield _windows(tokens, np.array([windows * context]), remainder)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (starts, length)."""
    every = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)  # from each token, not copied
    windows = torch.from_numpy(every[starts].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
