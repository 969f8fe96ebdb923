"""A corpus: documents from one or several sources, each split into training and validation text.

Documents are streamed in chunks of about 1 MiB, cut at line ends where possible, so the text need not fit in memory.
Memory grows only with file paths and by 24 bytes per document.
"""

import hashlib
from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.sources import find_files, read_documents, short_name

SPLITS = ("train", "val")
FEW = 20  # documents, of which one may be most of the text


class Corpus:
    """A list of documents, some of them held out for validation.

    The documents whose SHA-256 is in the lowest tenth of all possible hashes are held out, or the one with the lowest
    hash if these would be none or all. Of fewer than 20 documents, the last tenth of each is. So the split does not
    depend on the order of the documents, and copies of a document are on the same side.

    name: safe in folder names, at most 80 bytes long.
    hash: SHA-256 of the documents' hashes, in hex.
    sizes: UTF-8 bytes of each split, plus one per document for its end. If a document is split, the size may be off
    by one character.
    """

    def __init__(self, names: list[str], cache_dir: Path):
        """Find the text behind `names` (`python`, `shakespeare`, or paths) and read it once, to hash and split it.

        Downloads are kept in `cache_dir`. Raises ValueError, in one line, for text that is missing, empty, damaged, or
        not UTF-8.
        """
        self.names = names
        self.name = "+".join(map(short_name, names)).encode()[:80].decode(errors="ignore")
        sources = [(name, find_files(name, cache_dir)) for name in names]
        self._files = [file for _, files in sources for file in files]
        corpus_hash, hashes, lengths = hashlib.sha256(), array("Q"), array("q")
        with tqdm(unit="B", unit_scale=True, desc="reading text", delay=1, leave=False, disable=None) as bar:
            for source, files in sources:
                first = len(lengths)
                for document in chain.from_iterable(map(read_documents, files)):
                    digest, length = hashlib.sha256(), 0
                    for data in map(str.encode, document):
                        digest.update(data)
                        length += len(data)
                        bar.update(len(data))
                    corpus_hash.update(digest.digest())
                    hashes.append(int.from_bytes(digest.digest()[:8]))
                    lengths.append(length)
                if not any(lengths[first:]):
                    raise ValueError(f"--data {source}: contains no text")
        sizes, digests = np.frombuffer(lengths, np.int64), np.frombuffer(hashes, np.uint64)
        different = len(np.unique(digests[sizes > 0]))
        offsets = sizes - sizes // 10 if different < FEW else _split_offsets(digests, sizes)
        if 1 < different < FEW:
            corpus_hash.update(b"the last tenth of each is held out")  # once, whole documents were
        self.hash = corpus_hash.hexdigest()
        self._lengths, self._split_offsets = sizes, offsets  # lists would be 5 times as large
        parts = {"train": offsets, "val": sizes - offsets}
        self.sizes = {split: int(part.sum() + (part > 0).sum()) for split, part in parts.items()}

    def documents(self, split: str) -> Iterator[Iterator[str]]:
        """The documents of a split in order, each an iterator of chunks. Read each one before advancing to the next."""
        documents = chain.from_iterable(map(read_documents, self._files))
        for document, length, cut in zip(documents, self._lengths, self._split_offsets, strict=False):
            start, stop = (0, cut) if split == "train" else (cut, length)
            if start < stop:
                yield document if stop - start == length else _byte_slice(document, start, stop)


def _split_offsets(hashes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The byte offset at which each document's validation text begins: 0 or its end."""
    nonempty = lengths > 0
    held_out = hashes < 2**64 // 10
    if not held_out[nonempty].any() or held_out[nonempty].all():
        held_out = hashes == hashes[nonempty].min()
    return np.where(held_out, 0, lengths)


def _byte_slice(document: Iterator[str], start: int, stop: int) -> Iterator[str]:
    """The text between two byte offsets, each moved forward to the start of a character."""
    offset = 0
    for chunk in document:
        data = chunk.encode()
        rests = [data[max(index - offset, 0) :].decode(errors="ignore") for index in (start, stop)]
        yield chunk[len(chunk) - len(rests[0]) : len(chunk) - len(rests[1])]
        offset += len(data)
