"""Token files of others: `train.bin` and `val.bin` as nanoGPT and llm.c write them, or `train.npy` and `val.npy`.

They are memory-mapped, and nothing of them is read here but headers and both ends. Batches check the ids.
"""

import hashlib
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from files import require

SPLITS = ("train", "val")
SUFFIXES = (".bin", ".npy")
HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # llm.c: the dtype of ids, by magic number and version
HEADER_BYTES = 1024  # 256 int32; the third is the number of ids
EDGE = 1 << 20  # bytes at each end of a file that identify it, together with its size


def find_token_files(names: Sequence[str]) -> list[Path]:
    """The token files of both splits if one of the `names` of data is a folder that has them, or else none."""
    for folder in map(Path, names):
        if folder.suffix in SUFFIXES and folder.is_file():
            raise ValueError(f"{folder}: token files are named by their folder, which holds train.bin and val.bin")
        found = [[path for end in SUFFIXES if (path := folder / f"{split}{end}").is_file()] for split in SPLITS]
        if any(found):
            require(len(names) == 1, f"{folder} holds token files, which are not mixed with other data; name it alone")
            for split, paths in zip(SPLITS, found, strict=True):
                require(len(paths) == 1, f"{folder} needs either {split}.bin or {split}.npy")
            return [path for (path,) in found]
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
    """The ids in a file, memory-mapped. A .bin without `dtype` has that of its header, or uint16.

    They are read in windows at random places, so nothing more is read ahead.
    """
    offset, size = 0, path.stat().st_size
    if path.suffix == ".npy":
        try:
            tokens: np.ndarray = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: not a .npy file of ids: {error}") from None
        row = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        require(row, f"{path}: ids are a row of integers, not {tokens.dtype} of shape {tokens.shape}")
    else:
        if dtype is None:
            magic, version, count = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
            offset = HEADER_BYTES * ((magic, version) in HEADERS)
            dtype = np.dtype(HEADERS.get((magic, version), "<u2"))
            count = count if offset else size // dtype.itemsize
            right = size == offset + count * dtype.itemsize
            require(right, f"{path}: {size:,} bytes are not {count:,} {dtype} ids" + " and a header" * bool(offset))
        tokens = np.memmap(path, dtype, "r", offset) if size > offset else np.empty(0, dtype)
    if hasattr(mmap, "MADV_RANDOM") and isinstance(tokens.base, mmap.mmap):
        tokens.base.madvise(mmap.MADV_RANDOM)
    return tokens
