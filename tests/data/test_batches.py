"""The windows of a batch are functions of seed, step and row, and an evaluation covers the same tokens every time."""

import numpy as np
import pytest
import torch

from data.batches import evaluation_batches, training_batch


def starts_of(seed: int, step: int, rows: range, length: int = 10_000, context: int = 16) -> list[int]:
    """The start of each window: token i is i, so the first token of a row is its start."""
    inputs, _ = training_batch(np.arange(length, dtype=np.uint16), seed, step, rows, context)
    return inputs[:, 0].tolist()


def test_training_windows_are_contiguous_and_targets_are_shifted_by_one():
    tokens = np.random.default_rng(0).integers(0, 60_000, 5000).astype(np.uint16)
    inputs, targets = training_batch(tokens, seed=1, step=2, rows=range(64), context=32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (64, 32)
    windows = {bytes(tokens[start : start + 33]) for start in range(5000 - 32)}
    for row in torch.cat((inputs, targets[:, -1:]), dim=1).numpy().astype(np.uint16):
        assert bytes(row) in windows
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_row_depends_only_on_seed_step_and_row_index():
    starts = starts_of(7, 3, range(64))
    for rows in (range(1), range(5, 6), range(16, 48), range(63, 64)):
        assert starts_of(7, 3, rows) == starts[rows.start : rows.stop]
    torch.manual_seed(0), np.random.seed(0)
    assert starts_of(7, 3, range(64)) == starts
    draws = {tuple(starts_of(seed, step, range(8))) for seed in range(20) for step in range(20)}
    assert len(draws) == 400, "seeds and steps draw different windows"


def test_windows_of_a_seed_do_not_change_between_versions():
    """Recorded values: runs must be reproducible with later versions of this code and of NumPy."""
    assert starts_of(0, 0, range(4)) == [923, 7346, 6009, 9948]
    assert starts_of(1234, 567, range(4)) == [8728, 4352, 2549, 1522]
    assert set(starts_of(0, 0, range(99), length=6, context=4)) == {0, 1}, "the last window is drawn too"


@pytest.mark.parametrize("length", [2, 8, 9, 10, 33, 100])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_evaluation_covers_every_target_once(length, batch_size):
    tokens = np.random.default_rng(0).integers(0, 60_000, length).astype(np.uint16)
    batches = list(evaluation_batches(tokens, 8, batch_size))
    for inputs, targets in batches:
        assert inputs.shape == targets.shape and len(inputs) <= batch_size
    assert [token for _, targets in batches for token in targets.flatten().tolist()] == tokens[1:].tolist()
    assert [token for inputs, _ in batches for token in inputs.flatten().tolist()] == tokens[:-1].tolist()
    assert all(inputs.shape == (batch_size, 8) for inputs, _ in batches[:-2])


@pytest.mark.parametrize(
    "max_tokens, expected",
    [(None, 99), (99, 99), (98, 96), (96, 96), (95, 88), (50, 48), (8, 8), (1, 8)],
)
def test_evaluation_of_at_most_max_tokens(max_tokens, expected):
    """Only full windows are used, at least one, evenly spaced. 99 targets are twelve windows of 8 and three tokens."""
    tokens = np.random.default_rng(0).integers(0, 60_000, 100).astype(np.uint16)
    all_targets: list[int] = []
    for inputs, targets in evaluation_batches(tokens, 8, 3, max_tokens):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert expected == 99 or inputs.shape[1] == 8
        all_targets += targets.flatten().tolist()
    starts = [int(12 * i / (expected / 8)) * 8 for i in range(expected // 8)]
    spaced = [token for start in starts for token in tokens[start + 1 : start + 9].tolist()]
    assert all_targets == (tokens[1:].tolist() if expected == 99 else spaced)
    assert len(list(evaluation_batches(tokens[:4], 8, 3, max_tokens=2))) == 1, "shorter than a window"
