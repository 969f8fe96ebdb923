"""A corpus: documents from one or several sources, split into training and validation text.

Text is read in chunks of about 1 MiB, so it need not fit in memory. It is read once for its hash and its sizes, which
an index in the cache keeps for as long as no file has another size or modification time.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.batches import SPLITS, find_token_files, identify, map_tokens
from data.sources import find_files, read_documents, short_name, text_files
from files import Json, lock_file, read_cached, require, warn, warned, write_ours

RULES = "split 2, encoding 2"  # how a corpus is split and encoded; increase a number whenever its rule changes
HELD_OUT = 0.1  # share of the bytes
MOST_HELD_OUT = 100_000_000  # bytes
CHANGED = "the text of {} changed; run the command again, and if that does not help, delete the folder of --cache-dir"
LEFT_OUT = -1
LONG_DOCUMENT = 0.1  # share of the validation text, above which a document is split


class Corpus:
    """A list of documents, a tenth of whose bytes (at most 100 MB) are held out for validation.

    docs/python.md has the rule, which does not depend on the order of the documents. With `val_names`, those texts are
    the validation text; their copies in the other text are left out. Token files of others are taken as they are.

    name: safe in folder names, at most 80 bytes long.
    hash: SHA-256 of the rules, the documents' hashes, and which are named for validation, in hex.
    sizes: UTF-8 bytes of each split, plus one per document for its end. If a document is split, the size may be off
    by one character. Of token files, the ids.
    tokens: the ids of each split; none unless they are token files.
    """

    def __init__(self, names: list[str], cache_dir: Path, val_names: Sequence[str] = (), column: str = "text"):
        """Find what is behind `names` (`python`, `shakespeare`, or paths), and read text unless the index has it.

        Downloads and the index are kept in `cache_dir`. `column` has the text in JSON lines and .parquet files.
        """
        self.names, self.val_names, self.column, self.cache_dir = names, val_names, column, cache_dir
        self.name = "+".join(map(short_name, names or val_names)).encode()[:80].decode(errors="ignore")
        paths = find_token_files([*names, *val_names])
        self.tokens = [map_tokens(path) for path in paths]
        if paths:
            self.hash = identify(paths)
            self.sizes = dict(zip(SPLITS, map(len, self.tokens), strict=True))
            return
        cache_dir.mkdir(parents=True, exist_ok=True)
        self._files, self._key = self._find()
        index = cache_dir / f"{self.name}-{self._key[:12]}.index"
        record = read_cached(index, self._key)
        with nullcontext() if record else lock_file(index.with_suffix(".lock"), wait=True):
            record = record or read_cached(index, self._key)  # ranks and runs start together
            if not record:
                before = len(warned)
                record = self._read[0] | {"said": warned[before:]}
                write_ours(index, record, self._key)
        for line in record["said"]:
            warn(line)
        self.hash, self.sizes = record["hash"], record["sizes"]

    def parts(self) -> Iterator[tuple[str, bool, Iterator[str]]]:
        """All text in the order of the documents: its split, whether it is the beginning of a document, its chunks.

        Chunks that were not read are passed over. Raises ValueError, at the latest at the end, if a file has changed.
        """
        record, files, cuts = self._read
        require(record["hash"] == self.hash, CHANGED.format(self.name))
        for document, cut in zip(read_documents(files, self.column), cuts, strict=False):
            if cut != LEFT_OUT:
                for split, divided in groupby(_divide(document, cut), itemgetter(0)):
                    yield split, split == "train" or cut == 0, map(itemgetter(1), divided)
        require(self._find()[1] == self._key, CHANGED.format(self.name))

    def chunks(self, split: str) -> Iterator[str]:
        """The text of a split, without the borders of its documents."""
        return chain.from_iterable(chunks for part, _, chunks in self.parts() if part == split)

    def _find(self) -> tuple[list[tuple[str, str, list[Path]]], str]:
        """Flag, name and files of each source, and a hash of the rules, all paths, sizes and modification times."""
        named = [("--data", name) for name in self.names] + [("--val-data", name) for name in self.val_names]
        found = [(flag, name, find_files(name, self.cache_dir, flag)) for flag, name in named]
        digest = hashlib.sha256(repr((RULES, self.column, found)).encode())
        for file in filter(Path.is_file, chain.from_iterable(files for _, _, files in found)):  # no hidden folder
            stat = file.stat()
            digest.update(b"%d %d\n" % (stat.st_size, stat.st_mtime_ns))
        return found, digest.hexdigest()

    @cached_property
    def _read(self) -> tuple[Json, list[Path], np.ndarray]:
        """Reads all text: what the index keeps of it, its files, and the byte at which each document is cut."""
        read = []
        corpus_hash = hashlib.sha256(RULES.encode())
        hashes, lengths, for_training = array("Q"), array("q"), 0
        with progress_bar("reading text") as bar:
            for flag, name, files in self._files:
                texts = text_files(name, files, flag)
                first = len(lengths)
                for document in read_documents(texts, self.column):
                    digest, length = hashlib.sha256(), 0
                    for data in map(str.encode, document):
                        digest.update(data)
                        length += len(data)
                        bar.update(len(data))
                    corpus_hash.update(flag.encode() + digest.digest())
                    hashes.append(int.from_bytes(digest.digest()[:8]))
                    lengths.append(length)
                require(any(lengths[first:]), f"{flag} {name}: contains no text")
                if flag == "--data":
                    for_training = len(lengths)
                read += texts
        sizes, digests = np.frombuffer(lengths, np.int64), np.frombuffer(hashes, np.uint64)
        cuts = _named(digests, sizes, for_training) if self.val_names else _split(digests, sizes)
        parts = {"train": np.maximum(cuts, 0), "val": np.where(cuts == LEFT_OUT, 0, sizes - cuts)}
        split_sizes = {split: int(part.sum() + (part > 0).sum()) for split, part in parts.items()}
        return {"hash": corpus_hash.hexdigest(), "sizes": split_sizes}, read, cuts


def progress_bar(name: str, total: int | None = None) -> tqdm:
    """A progress bar in bytes. Where standard error is no terminal, it is a line every 30 seconds."""
    left = " of {total_fmt}B, {remaining} left" if total else ""
    lines = {"mininterval": 30, "delay": 30, "leave": True, "bar_format": f"{{desc}}: {{n_fmt}}B{left}\n"}
    style = {"delay": 1, "leave": False} if sys.stderr.isatty() else lines
    return tqdm(total=total, unit="B", unit_scale=True, desc=name, smoothing=0, **style)


def _split(hashes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The byte where each document's training text ends and its validation text begins; see docs/python.md."""
    total = lengths.sum()
    share = min(HELD_OUT, MOST_HELD_OUT / total)
    slack = 2 * LONG_DOCUMENT * share * total
    # Texts in the order of their hashes.
    _, first, number, copies = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    length = lengths[first]
    long = length > LONG_DOCUMENT * share * total
    for cut in (long, long | (length * copies > slack)):  # the second if whole texts are not enough
        sizes = np.where(cut, 0, length * copies)
        whole = _whole(sizes, share * sizes.sum(), slack)
        if sizes[whole].sum() > share * sizes.sum() - slack:
            break
    held_out = np.where(cut, (length * share).astype(np.int64), np.where(whole, length, 0))
    return (length - held_out)[number]


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


def _named(hashes: np.ndarray, lengths: np.ndarray, for_training: int) -> np.ndarray:
    """As `_split`, or LEFT_OUT, where all documents after the first `for_training` are the validation text."""
    for_validation = np.arange(len(lengths)) >= for_training
    copies = np.isin(hashes, hashes[for_validation]) & (lengths > 0) & ~for_validation
    if copies.any():
        warn(f"documents of --data left out, because --val-data has them too: {copies.sum()}")
    return np.where(copies, LEFT_OUT, np.where(for_validation, 0, lengths))


def _divide(chunks: Iterator[str], cut: int) -> Iterator[tuple[str, str]]:
    """Each chunk and its split. The byte `cut` is moved forward to the start of a character."""
    offset = 0
    for chunk in chunks:
        data = chunk.encode()
        after = data[max(cut - offset, 0) :].decode(errors="ignore")
        if offset < cut:
            yield "train", chunk[: len(chunk) - len(after)]
        offset += len(data)
        if offset > cut:
            yield "val", after
