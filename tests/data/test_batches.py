"""The windows of a batch are functions of seed, step and row, and an evaluation covers the same tokens every time."""

import numpy as np
import pytest
import torch

from data.batches import evaluation_batches, training_batch
from files import BadInput


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


@pytest.mark.parametrize(("length", "batch_size"), [(5 * 16 + 1, 3), (1000 * 16 + 9, 64), (3 * 16 + 1, 7)])
def test_every_window_is_trained_on_once_an_epoch(length, batch_size):
    """In another order in each epoch and with each seed, whatever the rows that are requested."""
    tokens, windows = np.arange(length, dtype=np.uint16), (length - 1) // 16

    def starts(seed: int, step: int, rows: range) -> list[int]:
        return training_batch(tokens, seed, step, rows, 16, "epochs", batch_size)[0][:, 0].tolist()

    seen = [start for step in range(3 * windows) for start in starts(0, step, range(batch_size))]
    epochs = [seen[first : first + windows] for first in range(0, 3 * windows, windows)]
    assert all(sorted(epoch) == list(range(0, 16 * windows, 16)) for epoch in epochs)
    assert starts(0, 5, range(1, batch_size)) == seen[5 * batch_size + 1 : 6 * batch_size]
    if windows > 5:
        assert len({tuple(epoch) for epoch in epochs}) == 3 and starts(1, 0, range(batch_size)) != seen[:batch_size]


@pytest.mark.parametrize(("wrong", "dtype"), [(300, np.uint16), (256, np.uint32), (-1, np.int32)])
def test_an_id_outside_the_vocabulary_is_an_error_on_every_rank(wrong, dtype):
    """Each rank looks at all rows of the batch, so that none waits for another."""
    tokens = np.zeros(1000, dtype)
    tokens[700:] = wrong
    for rows in (range(2), range(30, 32)):
        with pytest.raises(BadInput, match=f"^token file has the id {wrong}, but --vocab-size is 256$"):
            training_batch(tokens, 0, 0, rows, 16, "random", 32, 256)
    with pytest.raises(BadInput, match=f"the id {wrong}"):
        list(evaluation_batches(tokens, 16, 8, vocab_size=256))


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
