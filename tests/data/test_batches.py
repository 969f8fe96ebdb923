"""Token files of nanoGPT, llm.c and NumPy; windows that are functions of seed, step and row, or cover every token."""

import os
from pathlib import Path

import numpy as np
import pytest

from data.batches import evaluation_batches, map_tokens, training_batch
from data.corpus import Corpus
from data.prepare import prepare
from files import BadInput

IDS = np.random.default_rng(0).integers(0, 256, 3000)
U2 = IDS.astype("<u2")


def starts_of(seed: int, step: int, rows: range, length: int = 10_000, context: int = 16) -> list[int]:
    """The start of each window: token i is i, so the first token of a row is its start."""
    inputs, _ = training_batch(np.arange(length, dtype=np.uint16), seed, step, rows, context)
    return inputs[:, 0].tolist()


def test_a_row_depends_only_on_seed_step_and_row_index():
    """Recorded values: runs must be reproducible with later versions of this code and of NumPy."""
    assert starts_of(0, 0, range(4)) == [923, 7346, 6009, 9948]
    assert starts_of(1234, 567, range(4)) == [8728, 4352, 2549, 1522]
    for rows in (range(1), range(2, 3), range(1, 4)):
        assert starts_of(0, 0, rows) == [923, 7346, 6009, 9948][rows.start : rows.stop]
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
    assert [token for _, targets in batches for token in targets.flatten().tolist()] == tokens[1:].tolist()
    assert [token for inputs, _ in batches for token in inputs.flatten().tolist()] == tokens[:-1].tolist()
    assert all(inputs.shape == (batch_size, 8) for inputs, _ in batches[:-2])


@pytest.mark.parametrize(("max_tokens", "used"), [(99, 12), (98, 12), (96, 12), (95, 11), (42, 5), (8, 1), (1, 1)])
def test_evaluation_of_at_most_max_tokens(max_tokens, used):
    """Only full windows are used, at least one, evenly spaced. 99 targets are twelve windows of 8 and three tokens."""
    tokens = np.arange(100, dtype=np.uint16)
    inputs = [row.tolist() for batch, _ in evaluation_batches(tokens, 8, 3, max_tokens) for row in batch]
    starts = [12 * number // used * 8 for number in range(used)]
    assert inputs == [[*range(start, start + 8)] for start in starts] + [[96, 97, 98]] * (max_tokens == 99)


def write(folder: Path, name: str, ids: np.ndarray | bytes, header: tuple[int, ...] = ()) -> Path:
    """With a header as llm.c writes it, if one is given."""
    folder.mkdir(exist_ok=True)
    if name.endswith(".npy") and not isinstance(ids, bytes):
        np.save(folder / name, ids, allow_pickle=True)
    else:
        start = np.zeros(256 if header else 0, np.int32)
        start[: len(header)] = header
        (folder / name).write_bytes(start.tobytes() + bytes(ids))
    return folder / name


FORMS: list[tuple] = [("train.bin", "<u2", ()), ("train.bin", "<u2", (20240520, 1, 3000))]
FORMS += [("train.bin", "<u4", (20240801, 7, 3000)), *(("train.npy", dtype, ()) for dtype in ("<u4", ">i4", "u1"))]


@pytest.mark.parametrize(("name", "dtype", "header"), FORMS)
def test_ids_are_those_of_the_file(tmp_path, name, dtype, header):
    tokens = map_tokens(write(tmp_path, name, IDS.astype(dtype), header))
    assert isinstance(tokens, np.memmap) and tokens.dtype == dtype and tokens.tolist() == IDS.tolist()


@pytest.mark.parametrize("vocab_size", [5, 300, 60_000, 1_000_000])
def test_ids_wider_than_uint16_need_a_header_or_npy(tmp_path, vocab_size):
    ids = np.random.default_rng(0).zipf(1.3, 9000) % vocab_size
    for dtype in ("<u4", "<i8"):
        with pytest.raises(ValueError, match=r"train\.bin: ids without a header are uint16, .* wider; .* \.npy"):
            map_tokens(write(tmp_path, "train.bin", ids.astype(dtype)))
    for narrow in (ids % 65536, 1 - np.arange(99) % 2, np.arange(9000) % 2 * 50):
        assert map_tokens(write(tmp_path, "val.bin", narrow.astype("<u2"))).tolist() == narrow.tolist()


BAD: dict[str, list[tuple]] = {
    "ids needs one train.bin or train.npy, and one val.bin or val.npy": [("train.bin", U2)],
    "train.bin: 6,001 bytes are not uint16 ids": [("train.bin", bytes(6001))],
    "train.bin: 7,024 bytes are not 2,999 uint16 ids and a header": [("train.bin", U2, (20240520, 1, 2999))],
    "train.bin: unknown header of magic number 20240520, version 2; save": [("train.bin", U2, (20240520, 2, 3000))],
    "train.bin: unknown header of magic number 7, version 1; save ids": [("train.bin", U2, (7, 1, 3000))],
    "ids holds shards: rename two to train.bin and val.bin, or": [("a_train_1.bin", U2), ("a_val_0.npy", U2)],
    "train.npy: ids are a row of integers, not float32 of shape (3000,)": [("train.npy", IDS.astype("f4"))],
    "train.npy: not a .npy file of ids: ": [("train.npy", np.array([None, "text"]))],
    "ids: the train split has at most 16 tokens, and 17 are needed; add": [("train.bin", U2[:16])],
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_is_one_line(tmp_path, message):
    written = [write(tmp_path / "ids", *each).name for each in BAD[message]]
    for split in () if message.startswith("ids ") else {"train", "val"} - {name[:-4] for name in written}:
        write(tmp_path / "ids", f"{split}.bin", U2)
    with pytest.raises(ValueError) as error:
        prepare([str(tmp_path / "ids")], "none", 500, tmp_path / "cache", 16)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_token_files_are_not_mixed_with_text_and_need_to_know_their_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.bin", "val.bin"):
        write(Path("ids"), name, U2)
        write(Path("few"), name, U2[:1])
    Path("text").write_text("text " * 99)
    prepared = prepare([], "none", 500, tmp_path, 16, val_names=["ids"])  # to evaluate on
    assert prepared.val.tolist() == U2.tolist() and prepared.val_gzip_bpb is None and prepared.corpus_name == "ids"
    for names, val_names, kind, message in (
        (["ids", "python"], [], "bytes", "ids holds token files, which are not mixed with other data"),
        (["ids/train.bin"], [], "bytes", r"train\.bin: token files are named by their folder"),
        (["ids"], [], "sentencepiece", "^token files need --tokenizer DIR or bytes, or"),
        (["text"], [], "none", "^text needs a tokenizer"),
        ([], ["few"], "none", "^few: the val split has at most 1 tokens, and 2 are needed"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(names, kind, 257, tmp_path, 16, val_names=val_names)


def test_sizes_and_ends_identify_token_files_and_nothing_else_of_them_is_read(tmp_path):
    """20 GB, sparse. What changes in the middle is not seen."""
    write(tmp_path / "ids", "val.bin", U2)
    train = write(tmp_path / "ids", "train.bin", U2)
    hashes = [Corpus([str(train.parent)], tmp_path).hash]
    os.truncate(train, 20 << 30)
    for place, seen in ((0, True), (-2, True), (10 << 30, False)):
        with open(train, "r+b") as file:
            file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
            file.write(b"\1\2")
        corpus = Corpus([str(train.parent)], tmp_path)
        hashes.append(corpus.hash)
        assert (hashes[-1] != hashes[-2]) == seen and corpus.sizes["train"] == 10 << 30
