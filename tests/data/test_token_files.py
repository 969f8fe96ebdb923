"""Token files of nanoGPT, llm.c and NumPy: what they hold, what identifies them, and errors in one line."""

import os
from pathlib import Path

import numpy as np
import pytest

from data import token_files
from data.prepare import prepare
from data.token_files import TokenFiles, find_token_files, map_tokens

IDS = np.random.default_rng(0).integers(0, 500, 3000)


def write(folder: Path, name: str, ids: np.ndarray = IDS, header: tuple[int, ...] = ()) -> Path:
    """With a header as llm.c writes it, if one is given."""
    folder.mkdir(exist_ok=True)
    if name.endswith(".npy"):
        np.save(folder / name, ids, allow_pickle=True)
    else:
        start = np.zeros(256 if header else 0, np.int32)
        start[: len(header)] = header
        (folder / name).write_bytes(start.tobytes() + ids.tobytes())
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
    ids = (IDS % 256).astype(dtype)
    tokens = map_tokens(write(tmp_path, name, ids, header), random=True)
    assert isinstance(tokens, np.memmap) and tokens.dtype == dtype and tokens.tolist() == ids.tolist()


U2 = IDS.astype("<u2")
BAD: dict[str, list[tuple]] = {
    "needs either val.bin or val.npy, and has neither": [("train.bin", U2)],
    "needs either train.bin or train.npy, and has neither": [("val.npy", U2)],
    "needs either train.bin or train.npy, and has both": [("train.bin", U2), ("train.npy", U2), ("val.bin", U2)],
    "train.bin: 6,001 bytes are not a whole number of uint16 ids": [("train.bin", np.zeros(6001, "u1"))],
    "train.bin holds no ids": [("train.bin", U2[:0])],
    "val.bin holds no ids": [("val.bin", U2[:0])],
    "train.bin: 7,024 bytes are not the 2,999 uint16 ids of its": [("train.bin", U2, (20240520, 1, 2999))],
    "train.bin: 7,024 bytes are not the 3,000 uint32 ids of its": [("train.bin", U2, (20240801, 7, 3000))],
    "train.npy: ids are a row of integers, not float32 of shape (3000,)": [("train.npy", IDS.astype("f4"))],
    "train.npy: ids are a row of integers, not uint16 of shape (30, 100)": [("train.npy", U2.reshape(30, 100))],
    "train.npy: ids are a row of integers, not uint16 of shape ()": [("train.npy", U2[0])],
    "train.npy: not a .npy file of ids": [("train.npy", np.array([None, "text"]))],
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


def test_a_file_that_is_no_array_or_is_cut_off_is_one_line(tmp_path):
    whole = write(tmp_path, "val.npy", U2).read_bytes()
    for content in (b"", b"text", whole[:-100], whole[:50]):
        (tmp_path / "train.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"train\.npy: not a \.npy file of ids"):
            map_tokens(tmp_path / "train.npy")


def test_token_files_are_not_mixed_with_text_and_need_to_know_their_ids(tmp_path):
    folder = str(write(tmp_path / "ids", "train.bin", U2).parent)
    write(tmp_path / "ids", "val.bin", U2)
    assert find_token_files(["python", str(tmp_path)]) is None and find_token_files([folder]) == folder
    for names, val_names in (([folder, "python"], []), ([folder], ["python"]), ([folder, folder], [])):
        with pytest.raises(ValueError, match="ids holds token files, which are not mixed with other data"):
            prepare(names, "bytes", 257, tmp_path, 16, val_names=val_names)
    with pytest.raises(ValueError, match=r"train\.bin: token files are named by their folder"):
        prepare([f"{folder}/train.bin"], "bytes", 257, tmp_path, 16)
    with pytest.raises(ValueError, match=r"^token files need --tokenizer DIR or bytes, or --vocab-size"):
        prepare([folder], "sentencepiece", 500, tmp_path, 16)
    (tmp_path / "text").write_text("text " * 99)
    with pytest.raises(ValueError, match=r"^--tokenizer none is for token files; text needs another$"):
        prepare([str(tmp_path / "text")], "none", 500, tmp_path, 16)
    prepared = prepare([], "none", 500, tmp_path, 16, val_names=[folder])  # to evaluate on
    assert prepared.val.tolist() == U2.tolist() and prepared.val_gzip_bpb is None and prepared.corpus_name == "ids"


def test_sizes_and_ends_identify_token_files_and_nothing_else_of_them_is_read(tmp_path, monkeypatch):
    """20 GB, sparse. What changes in the middle is not seen; a later start reads nothing."""
    write(tmp_path / "ids", "val.bin", U2)
    train = write(tmp_path / "ids", "train.bin", U2)
    hashes = [TokenFiles([str(train.parent)], tmp_path).hash]
    os.truncate(train, 20 << 30)
    for place, seen in ((0, True), (-2, True), (10 << 30, False)):
        with open(train, "r+b") as file:
            file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
            file.write(b"\1\2")
        hashes.append(TokenFiles([str(train.parent)], tmp_path, verify=True).hash)
        assert (hashes[-1] != hashes[-2]) == seen
    monkeypatch.setattr(token_files, "_identify", None)
    assert TokenFiles([str(train.parent)], tmp_path).hash == hashes[-1]
    assert len(TokenFiles([str(train.parent)], tmp_path).train) == 10 << 30
