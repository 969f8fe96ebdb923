"""Token files, and the windows of them that a model is trained and evaluated on.

Those of others are `train.bin` and `val.bin` as nanoGPT and llm.c write them, or `train.npy` and `val.npy`. They are
memory-mapped, and nothing of them is read at the start but headers and both ends.
"""

import hashlib
import mmap
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from files import BadInput, require

SPLITS = ("train", "val")
SUFFIXES = (".bin", ".npy")
HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # llm.c: the dtype of ids, by magic number and version
HEADER_BYTES = 1024  # 256 int32; the third is the number of ids
Batch = tuple[Tensor, Tensor]  # inputs and targets
EDGE = 1 << 20  # bytes at each end of a file that identify it, together with its size


def find_token_files(names: Sequence[str]) -> list[Path]:
    """The token files of both splits if one of the `names` of data is a folder that has them, or else none."""
    for folder in map(Path, names):
        if folder.suffix in SUFFIXES and folder.is_file():
            raise ValueError(f"{folder}: token files are named by their folder, which holds train.bin and val.bin")
        paths = [folder / f"{split}{end}" for split in SPLITS for end in SUFFIXES]
        if found := [path for path in paths if path.is_file()]:
            require(len(names) == 1, f"{folder} holds token files, which are not mixed with other data; name it alone")
            one_of_each = [path.stem for path in found] == [*SPLITS]
            require(one_of_each, f"{folder} needs one train.bin or train.npy, and one val.bin or val.npy")
            return found
        shards = [path for path in folder.glob("*_train_[0-9]*") if path.suffix in SUFFIXES]
        require(not shards, f"{folder} holds shards: rename two to train.bin and val.bin, or join each split as .npy")
    return []


def identify(paths: Iterable[Path]) -> str:
    """The hash of the sizes and ends of files."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        with open(path, "rb") as file:
            digest.update(f"{path.name} {size} ".encode() + file.read(EDGE))
            file.seek(max(size - EDGE, 0))
            digest.update(file.read(EDGE))
    return digest.hexdigest()


def map_tokens(path: Path, dtype: np.dtype | None = None) -> np.ndarray:
    """The ids in a file, memory-mapped. A .bin without `dtype` is one of others, whose header says the dtype."""
    if path.suffix == ".npy":
        try:
            tokens = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: not a .npy file of ids: {error}") from None
        row = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        require(row, f"{path}: ids are a row of integers, not {tokens.dtype} of shape {tokens.shape}")
    else:
        offset = 0
        if dtype is None:
            dtype, offset = _read_header(path)
        if path.stat().st_size == offset:
            return np.empty(0, dtype)  # which cannot be mapped
        tokens = np.memmap(path, dtype, "r", offset)
    if hasattr(mmap, "MADV_RANDOM") and isinstance(tokens.base, mmap.mmap):
        tokens.base.madvise(mmap.MADV_RANDOM)  # windows are at random places: nothing is read ahead
    return tokens


def _read_header(path: Path) -> tuple[np.dtype, int]:
    """The dtype of the ids in a .bin of others, which is uint16 without a header, and the byte where they begin."""
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", HEADER_BYTES // 4)
    magic, version, count = [*header.tolist(), 0, 0, 0][:3]
    if (magic, version) in HEADERS:
        dtype = np.dtype(HEADERS[magic, version])
        right = size == HEADER_BYTES + count * dtype.itemsize
        require(right, f"{path}: {size:,} bytes are not {count:,} {dtype} ids and a header")
        return dtype, HEADER_BYTES
    require(size % 2 == 0, f"{path}: {size:,} bytes are not uint16 ids")
    unknown = magic and size >= HEADER_BYTES and not header[3:].any()
    require(not unknown, f"{path}: unknown header of magic number {magic}, version {version}; save ids as .npy")
    ids = np.fromfile(path, "<u2", EDGE)
    wide = len(ids) > 99 and ids[::2].sum() > 100 * ids[1::2].sum()
    require(not wide, f"{path}: ids without a header are uint16, and these look wider; save them as .npy")
    return np.dtype("<u2"), 0


def training_batch(
    tokens: np.ndarray,
    seed: int,
    step: int,
    rows: range,
    context: int,
    order: str = "random",
    batch_size: int | None = None,
    vocab_size: int | None = None,
) -> Batch:
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
) -> Iterator[Batch]:
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


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int, vocab_size: int | None) -> Batch:
    """Inputs and targets, int64 (starts, length)."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
    ids = windows[starts].astype(np.int64)  # only these are copied
    wrong = ids[(ids < 0) | (ids >= vocab_size)] if vocab_size else []
    if len(wrong):
        file = getattr(tokens, "filename", "token file")
        raise BadInput(f"{file} has the id {wrong[0]}, but --vocab-size is {vocab_size}")
    both = torch.from_numpy(ids)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@lru_cache(maxsize=2)  # a batch may be in two epochs
def _order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """A random order of the windows. Ten million of them take 2 s and 40 MB."""
    draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(windows)
    return draws.argsort(kind="stable").astype(np.uint32)
