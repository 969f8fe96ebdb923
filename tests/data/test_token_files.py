"""Token files of nanoGPT, llm.c and NumPy: what they hold, what identifies them, and errors in one line."""

import os
from pathlib import Path

import numpy as np
import pytest

from data.corpus import Corpus
from data.prepare import prepare
from data.token_files import map_tokens

IDS = np.random.default_rng(0).integers(0, 256, 3000)
U2 = IDS.astype("<u2")


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


@pytest.mark.parametrize(
    ("name", "dtype", "header"),
    [
        ("train.bin", "<u2", ()),
        ("train.bin", "<u2", (20240520, 1, 3000)),
        ("train.bin", "<u4", (20240801, 7, 3000)),
        *(("train.npy", dtype, ()) for dtype in ("<u2", "<u4", "<i8", ">i4", "u1")),
    ],
)
def test_ids_are_those_of_the_file(tmp_path, name, dtype, header):
    tokens = map_tokens(write(tmp_path, name, IDS.astype(dtype), header))
    assert isinstance(tokens, np.memmap) and tokens.dtype == dtype and tokens.tolist() == IDS.tolist()


BAD: dict[str, list[tuple]] = {
    "ids needs either val.bin or val.npy": [("train.bin", U2)],
    "ids needs either train.bin or train.npy": [("train.bin", U2), ("train.npy", U2), ("val.bin", U2)],
    "train.bin: 6,001 bytes are not 3,000 uint16 ids": [("train.bin", bytes(6001))],
    "train.bin: 7,024 bytes are not 2,999 uint16 ids and a header": [("train.bin", U2, (20240520, 1, 2999))],
    "train.npy: ids are a row of integers, not float32 of shape (3000,)": [("train.npy", IDS.astype("f4"))],
    "train.npy: ids are a row of integers, not uint16 of shape (30, 100)": [("train.npy", U2.reshape(30, 100))],
    "train.npy: not a .npy file of ids": [("train.npy", np.array([None, "text"]))],
    "train.npy: not a .npy file of ids: ": [("train.npy", b"text")],
    "the training text has at most 16 tokens, but --context 16 needs 17": [("train.bin", U2[:16])],
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_is_one_line(tmp_path, message):
    written = [write(tmp_path / "ids", *each).name for each in BAD[message]]
    for split in () if "needs either" in message else {"train", "val"} - {name[:-4] for name in written}:
        write(tmp_path / "ids", f"{split}.bin", U2)
    with pytest.raises(ValueError) as error:
        prepare([str(tmp_path / "ids")], "none", 500, tmp_path / "cache", 16)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("names", "val_names", "kind", "message"),
    [
        (["ids", "python"], [], "bytes", "ids holds token files, which are not mixed with other data"),
        (["ids"], ["python"], "bytes", "ids holds token files, which are not mixed with other data"),
        (["ids/train.bin"], [], "bytes", r"train\.bin: token files are named by their folder"),
        (["ids"], [], "sentencepiece", "^token files need --tokenizer DIR or bytes, or --vocab-size"),
        (["text"], [], "none", "^text needs a tokenizer"),
    ],
)
def test_token_files_are_not_mixed_with_text_and_need_to_know_their_ids(tmp_path, names, val_names, kind, message):
    for name in ("train.bin", "val.bin"):
        write(tmp_path / "ids", name, U2)
    (tmp_path / "text").write_text("text " * 99)
    paths = [str(tmp_path / name) for name in names]
    with pytest.raises(ValueError, match=message):
        prepare(paths, kind, 257, tmp_path, 16, val_names=val_names)
    prepared = prepare([], "none", 500, tmp_path, 16, val_names=[str(tmp_path / "ids")])  # to evaluate on
    assert prepared.val.tolist() == U2.tolist() and prepared.val_gzip_bpb is None and prepared.corpus_name == "ids"
    for size in (0, 1):
        write(tmp_path / "few", "train.bin", U2), write(tmp_path / "few", "val.bin", U2[:size])
        with pytest.raises(ValueError, match=r"few: an evaluation needs at least 2 tokens$"):
            prepare([], "none", 500, tmp_path, 16, val_names=[str(tmp_path / "few")])


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
