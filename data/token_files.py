"""Token files of others: `train.bin` and `val.bin` as nanoGPT and llm.c write them, or `train.npy` and `val.npy`.

They are memory-mapped, and nothing of them is read here but headers and both ends. Batches check the ids.
"""

import hashlib
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.corpus import SPLITS
from data.index import indexed, stat_key
from data.sources import short_name
from files import require

SUFFIXES = (".bin", ".npy")
HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # of llm.c: dtype of the ids by magic number and version
HEADER_BYTES = 1024  # 256 int32; the third is the number of ids
EDGE = 1 << 20  # bytes at each end of a file that identify it, together with its size


class TokenFiles:
    """The ids in a folder, `train` and `val`, with the `name` and `hash` that a `Corpus` has."""

    def __init__(self, names: list[str], cache_dir: Path, val_names: Sequence[str] = (), verify: bool = False):
        self.names, self.val_names = names, val_names  # one of them is the folder, and there is no other
        folder = (*names, *val_names)[0]
        paths = [_find(Path(folder), split) for split in SPLITS]
        self.name = short_name(folder)
        self.train, self.val = map_tokens(paths[0], random=True), map_tokens(paths[1])
        for path, tokens in zip(paths, (self.train, self.val), strict=True):
            require(len(tokens), f"{path} holds no ids")
        index = cache_dir / f"{self.name}-{stat_key('ids', paths)[:12]}.index"
        self.hash: str = indexed(index, lambda: _identify(paths), verify)["hash"]


def find_token_files(names: Sequence[str]) -> str | None:
    """The folder of token files among the `names` of data, if there is one."""
    for name in names:
        folder = Path(name)
        if folder.suffix in SUFFIXES and folder.is_file():
            raise ValueError(f"{name}: token files are named by their folder, which holds train.bin and val.bin")
        if any((folder / f"{split}{suffix}").is_file() for split in SPLITS for suffix in SUFFIXES):
            require(len(names) == 1, f"{name} holds token files, which are not mixed with other data; name it alone")
            return name
    return None


def map_tokens(path: Path, dtype: np.dtype | None = None, random: bool = False) -> np.ndarray:
    """The ids in a file, memory-mapped. A .bin without `dtype` has that of its header, or uint16.

    random: they are read in windows at random places, so nothing more is to be read ahead.
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
            whole = max(size - offset, 0) % dtype.itemsize == 0
            require(whole, f"{path}: {size:,} bytes are not a whole number of {dtype} ids")
            right = not offset or size == offset + count * dtype.itemsize
            require(right, f"{path}: {size:,} bytes are not the {count:,} {dtype} ids of its header")
        tokens = np.memmap(path, dtype, "r", offset) if size > offset else np.empty(0, dtype)
    if random and hasattr(mmap, "MADV_RANDOM") and isinstance(tokens.base, mmap.mmap):
        tokens.base.madvise(mmap.MADV_RANDOM)
    return tokens


def _find(folder: Path, split: str) -> Path:
    found = [path for suffix in SUFFIXES if (path := folder / f"{split}{suffix}").is_file()]
    one = f"{folder} needs either {split}.bin or {split}.npy"
    require(len(found) == 1, f"{one}, and has {'both' if found else 'neither'}")
    return found[0]


def _identify(paths: Iterable[Path]) -> dict[str, Any]:
    """The hash of their sizes and ends."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        with open(path, "rb") as file:
            digest.update(f"{path.name} {size} ".encode() + file.read(EDGE))
            file.seek(max(size - EDGE, 0))
            digest.update(file.read(EDGE))
    return {"hash": digest.hexdigest()}
