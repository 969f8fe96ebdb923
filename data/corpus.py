"""A corpus: documents from one or several sources, each split into training and validation text.

    corpus = open_corpus(["python", "notes/"], Path(".cache"))
    for document in corpus.documents("train"):
        for chunk in document: ...

Nothing is held whole: a document comes in chunks of about 1 MiB, cut at line ends where there are any.
"""

import hashlib
from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from data.sources import find_files, read_documents, short_name

Split = Literal["train", "val"]
SPLITS: tuple[Split, Split] = ("train", "val")
DELAY = 1  # second without a bar, in which small corpora are done


def open_corpus(names: list[str], cache_dir: Path) -> "Corpus":
    """Find the text behind `names` (`python`, `shakespeare`, or paths) and read through it once.

    Raises ValueError in one line for what is missing, empty, damaged, or not UTF-8. What is downloaded is kept in
    `cache_dir`.
    """
    return Corpus(corpus_name(names), [(name, find_files(name, cache_dir)) for name in names])


def corpus_name(names: list[str]) -> str:
    """What to call several sources in the name of a folder, in at most 80 bytes."""
    return "+".join(map(short_name, names)).encode()[:80].decode(errors="ignore")


class Corpus:
    """Text in documents, some of them held out for validation.

    Which ones does not depend on their order, and copies of a document stay together: those whose SHA-256 is in the
    lowest tenth of all hashes or, should that be none or all of them, the one with the lowest. Where there is only one
    document, its last tenth is held out.

    name: short, for the names of folders.
    hash: SHA-256 over the documents, in hex.
    sizes: length of each split in UTF-8, counting the end of a document for one byte; give or take a character where a
    document is cut.
    """

    def __init__(self, name: str, sources: list[tuple[str, list[Path]]]):
        self.name = name
        self._files = [file for _, files in sources for file in files]
        contents, hashes, lengths = hashlib.sha256(), array("Q"), array("Q")
        with tqdm(unit="B", unit_scale=True, desc="reading the text", delay=DELAY, leave=False, disable=None) as bar:
            for source, files in sources:
                known = len(lengths)
                for document in chain.from_iterable(map(read_documents, files)):
                    digest, length = _digest(document, bar)
                    contents.update(digest)
                    hashes.append(int.from_bytes(digest[:8], "big"))
                    lengths.append(length)
                if not any(lengths[known:]):
                    raise ValueError(f"--data {source}: there is no text in it")
        self.hash = contents.hexdigest()
        self._lengths = np.array(lengths)
        self._cuts = _cuts(np.array(hashes), self._lengths)
        parts = {"train": self._cuts, "val": self._lengths - self._cuts}
        self.sizes: dict[Split, int] = {split: int(parts[split].sum() + (parts[split] > 0).sum()) for split in SPLITS}

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """The documents of a split, in order, each in chunks; be done with one before taking the next."""
        documents = chain.from_iterable(map(read_documents, self._files))
        for document, length, cut in zip(documents, self._lengths.tolist(), self._cuts.tolist(), strict=True):
            start, stop = (0, cut) if split == "train" else (cut, length)
            if start < stop:
                yield document if stop - start == length else _part(document, start, stop)


def _digest(document: Iterator[str], bar: tqdm) -> tuple[bytes, int]:
    digest, size = hashlib.sha256(), 0
    for chunk in document:
        data = chunk.encode()
        digest.update(data)
        size += len(data)
        bar.update(len(data))
    return digest.digest(), size


def _cuts(hashes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The byte at which each document's validation text begins: 0 or its end, unless there is only one."""
    written = hashes[lengths > 0]
    if (written == written[0]).all():
        return lengths - lengths // 10
    held_out = hashes < 2**64 // 10
    if not held_out[lengths > 0].any() or held_out[lengths > 0].all():
        held_out = hashes == written.min()
    return np.where(held_out, np.uint64(0), lengths)


def _part(document: Iterator[str], start: int, stop: int) -> Iterator[str]:
    """What lies between two bytes of a document, each moved up to where a character begins."""
    offset = 0
    for chunk in document:
        data = chunk.encode()
        piece = data[_boundary(data, start - offset) : _boundary(data, stop - offset)]
        if piece:
            yield piece.decode()
        offset += len(data)
        if offset >= stop:
            break


def _boundary(data: bytes, at: int) -> int:
    at = min(max(at, 0), len(data))
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at
