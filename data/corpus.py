"""A corpus: documents from one or several sources, split into training and validation text.

Documents are streamed in chunks of about 1 MiB, so the text need not fit in memory. Memory grows only with file paths
and by 32 bytes per document.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.sources import find_files, read_documents, short_name
from files import warn

SPLITS = ("train", "val")
RULES = "split 2, encoding 2"  # how a corpus is split and encoded; increase a number whenever its rule changes
HELD_OUT = 0.1  # share of the bytes
MOST_HELD_OUT = 100_000_000  # bytes
LONG = 0.1  # share of the validation text. Longer documents are split, shorter ones are held out whole or not at all.


class Corpus:
    """A list of documents, a tenth of whose bytes (at most 100 MB) are held out for validation.

    A document longer than a hundredth of the corpus gives its own last tenth. Of the others, whole ones are held out in
    the order of their SHA-256, until that is a tenth of their bytes. Copies of a text count together and are treated
    alike; where they are too large for that, they give their last tenths too. So the split does not depend on the order
    of the documents. With `val_names`, those texts are the validation text; their copies in the other text are left
    out.

    name: safe in folder names, at most 80 bytes long.
    hash: SHA-256 of the rules, the documents' hashes, and which are named for validation, in hex.
    sizes: UTF-8 bytes of each split, plus one per document for its end. If a document is split, the size may be off
    by one character.
    """

    def __init__(self, names: list[str], cache_dir: Path, val_names: Sequence[str] = (), column: str = "text"):
        """Find the text behind `names` (`python`, `shakespeare`, or paths) and read it once, to hash and split it.

        Downloads are kept in `cache_dir`. `column` is the key or column of the text in JSON lines and .parquet files.
        Raises ValueError, in one line, for text that is missing, empty, damaged, or not UTF-8.
        """
        self.names, self.val_names, self.column = names, val_names, column
        self.name = "+".join(map(short_name, names or val_names)).encode()[:80].decode(errors="ignore")
        named = [("--data", name) for name in names] + [("--val-data", name) for name in val_names]
        sources = [(flag, name, find_files(name, cache_dir, flag)) for flag, name in named]
        self._files = [file for _, _, files in sources for file in files]
        corpus_hash, hashes, lengths, for_training = hashlib.sha256(RULES.encode()), array("Q"), array("q"), 0
        with tqdm(unit="B", unit_scale=True, desc="reading text", delay=1, leave=False, disable=None) as bar:
            for flag, name, files in sources:
                first = len(lengths)
                for document in self._read(files):
                    digest, length = hashlib.sha256(), 0
                    for data in map(str.encode, document):
                        digest.update(data)
                        length += len(data)
                        bar.update(len(data))
                    corpus_hash.update(flag.encode() + digest.digest())
                    hashes.append(int.from_bytes(digest.digest()[:8]))
                    lengths.append(length)
                if not any(lengths[first:]):
                    raise ValueError(f"{flag} {name}: contains no text")
                for_training += (len(lengths) - first) * (flag == "--data")
        self.hash = corpus_hash.hexdigest()
        sizes, digests = np.frombuffer(lengths, np.int64), np.frombuffer(hashes, np.uint64)
        # Of each document, the bytes before the first of these are for training, and those from the second on for
        # validation. Lists would be 5 times as large.
        self._lengths, self._train_ends, self._val_starts = (
            sizes,
            *(_named(digests, sizes, for_training) if val_names else _split(digests, sizes)),
        )
        parts = {"train": self._train_ends, "val": sizes - self._val_starts}
        self.sizes = {split: int(part.sum() + (part > 0).sum()) for split, part in parts.items()}

    def documents(self, split: str) -> Iterator[tuple[bool, Iterator[str]]]:
        """The documents of a split in order: whether the text is the beginning of a document, and its chunks.

        Read each one before advancing to the next.
        """
        cuts = zip(self._lengths, self._train_ends, self._val_starts, strict=True)
        for document, (length, train_end, val_start) in zip(self._read(self._files), cuts, strict=False):
            start, stop = (0, train_end) if split == "train" else (val_start, length)
            if start < stop:
                yield start == 0, document if stop - start == length else _byte_slice(document, start, stop)

    def chunks(self, split: str) -> Iterator[str]:
        """The text of a split, without the borders of its documents."""
        return chain.from_iterable(chunks for _, chunks in self.documents(split))

    def _read(self, files: list[Path]) -> Iterator[Iterator[str]]:
        return chain.from_iterable(read_documents(file, self.column) for file in files)


def _split(hashes: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each document's training text ends and its validation text begins, by the rule of `Corpus`."""
    total = lengths.sum()
    share = min(HELD_OUT, MOST_HELD_OUT / total)
    slack = 2 * LONG * share * total
    _, number, copies = np.unique(hashes, return_inverse=True, return_counts=True)  # texts in the order of their hashes
    length = np.zeros(len(copies), np.int64)
    length[number] = lengths
    long = length > LONG * share * total
    for cut in (long, long | (length * copies > slack)):  # the second if whole texts do not do
        sizes = np.where(cut, 0, length * copies)
        whole = _whole(sizes, share * sizes.sum(), slack)
        if sizes[whole].sum() > share * sizes.sum() - slack:
            break
    held_out = np.where(cut, (length * share).astype(np.int64), np.where(whole, length, 0))
    return (length - held_out)[number], (length - held_out)[number]


def _whole(sizes: np.ndarray, wanted: float, slack: float) -> np.ndarray:
    """Which texts are held out, in order, until they have `wanted` bytes. Those that would add too much are not."""
    sizes = sizes.copy()
    while True:
        before = sizes.cumsum() - sizes
        taken = (sizes > 0) & (before < wanted)
        too_much = taken & (before + sizes > wanted + slack)
        if not too_much.any():
            return taken
        sizes[too_much.argmax()] = 0


def _named(hashes: np.ndarray, lengths: np.ndarray, for_training: int) -> tuple[np.ndarray, np.ndarray]:
    """As `_split`, where all documents after the first `for_training` are the validation text."""
    for_validation = np.arange(len(lengths)) >= for_training
    copies = np.isin(hashes, hashes[for_validation]) & (lengths > 0) & ~for_validation
    if copies.any():
        warn(f"documents of --data left out, because --val-data has them too: {copies.sum()}")
    return np.where(copies | for_validation, 0, lengths), np.where(for_validation, 0, lengths)


def _byte_slice(document: Iterator[str], start: int, stop: int) -> Iterator[str]:
    """The text between two byte offsets, each moved forward to the start of a character."""
    offset = 0
    for chunk in document:
        data = chunk.encode()
        rests = [data[max(index - offset, 0) :].decode(errors="ignore") for index in (start, stop)]
        yield chunk[len(chunk) - len(rests[0]) : len(chunk) - len(rests[1])]
        offset += len(data)
