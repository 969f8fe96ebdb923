"""Encodes a corpus into token files. What a process that was stopped has done is not done again.

The libraries of the tokenizers encode a batch on all CPUs.
"""

import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.corpus import Corpus, progress_bar
from data.token_files import SPLITS
from data.tokenizer import Ids, Tokenizer
from files import explained, read_json, sync, write_atomically

# Characters. A document of up to WHOLE is encoded as one text, a longer one in windows that overlap.
WHOLE, WINDOW, OVERLAP = 1 << 24, 1 << 18, 1 << 13
BATCH_CHARS = 1 << 20  # encoded at a time; at least two windows
SAVE_EVERY = 30  # seconds between records of what is done
PROGRESS = "progress.json"
NO_STARTS = np.empty(0, np.int64)


def write_tokens(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> float:
    """Write `train.bin` and `val.bin`, and return the bits per byte of the validation text after `gzip -9`.

    A document is the ids that begin a prompt (unless only its end is in this split), those of its text, and the
    end-of-document id. The ids do not depend on where an earlier process was stopped.
    """
    dtype, total = token_dtype(tokenizer), sum(corpus.sizes.values())
    gzip, sizes = zlib.compressobj(9, wbits=31), np.zeros(2)  # bytes of validation text, before and after
    paths = {split: folder / f"{split}.bin" for split in SPLITS}
    try:
        progress = read_json(folder / PROGRESS, dict[str, int])  # batches that are done, and the bytes of each file
    except ValueError:
        progress = dict.fromkeys(("done", *SPLITS), 0)
    for split, path in paths.items():
        with open(path, "ab") as file:
            file.truncate(progress[split])
    saved = time.monotonic()
    with progress_bar("encoding", total) as bar:

        def count(split: str, data: bytes) -> None:
            bar.update(len(data))
            if split == "val":
                sizes[:] += len(data), len(gzip.compress(data))

        batches = _batches(corpus, count)
        first = max(progress["done"] - 1, 0)  # the last one is encoded again, for the window at its end
        deque(islice(batches, first), maxlen=0)
        bar.initial = bar.n
        for parts in islice(_join(batches, tokenizer), progress["done"] - first, None):
            for split, path in paths.items():
                data = np.concatenate([[], *parts[split]], dtype=dtype, casting="unsafe").tobytes()
                progress[split] += len(data)
                with explained(path, corpus.sizes[split] * dtype.itemsize), open(path, "ab") as file:
                    file.write(data)
            progress["done"] += 1
            if time.monotonic() - saved >= SAVE_EVERY:
                for path in paths.values():
                    sync(path)
                write_atomically(folder / PROGRESS, json.dumps(progress))
                saved = time.monotonic()
    size, compressed = sizes.tolist()
    return 8 * (compressed + len(gzip.flush())) / max(size, 1)


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


# --- what is encoded at a time ---------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A document's text in one split, or a window of it if it is long."""

    split: str
    begins: bool  # at the beginning of the document
    ends: bool  # at the end of the text
    offset: int  # the byte of the text at which it begins
    text: str

    @property
    def whole(self) -> bool:
        return self.ends and not self.offset


def _batches(corpus: Corpus, count: Callable[[str, bytes], None]) -> Iterator[list[Piece]]:
    batch, chars = list[Piece](), 0
    for piece in _pieces(corpus, count):
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    yield batch


def _pieces(corpus: Corpus, count: Callable[[str, bytes], None]) -> Iterator[Piece]:
    """The corpus in order. All of its text goes to `count`, too."""
    for split, begins, chunks in corpus.parts():
        offset, text = 0, ""
        for chunk in chunks:
            count(split, chunk.encode())
            text += chunk
            while len(text) > (WINDOW + OVERLAP if offset else WHOLE):
                yield Piece(split, begins and not offset, False, offset, text[: WINDOW + OVERLAP])
                offset += len(text[:WINDOW].encode())
                text = text[WINDOW:]
        yield Piece(split, begins and not offset, True, offset, text)


def _join(batches: Iterator[list[Piece]], tokenizer: Tokenizer) -> Iterator[dict[str, list[Ids]]]:
    """The ids that come next in each split, batch by batch.

    One window gives way to the next where both begin a token. That is in the middle of their overlap, far from both
    ends, where a text that goes on may have other tokens.
    """
    ids = starts = NO_STARTS  # ids of the last window, and the byte where each begins
    for batch in batches:
        parts: dict[str, list[Ids]] = {split: [] for split in SPLITS}
        for piece, (new, new_starts) in zip(batch, _encode(batch, tokenizer), strict=True):
            part, first = parts[piece.split], 0
            if piece.begins:
                part.append(tokenizer.prompt_start)
            if piece.offset:
                new_starts = new_starts + piece.offset
                overlap = starts[starts >= piece.offset]
                common = np.intersect1d(overlap, new_starts[: 4 * OVERLAP])  # at most 4 bytes a character
                if len(common):
                    end = start = common[len(common) // 2]
                else:  # text that repeats itself: what is between two tokens is encoded alone
                    end = [*overlap, piece.offset][0]
                    start = [*new_starts[new_starts >= end], piece.offset + len(piece.text.encode())][0]
                between = piece.text.encode()[end - piece.offset : start - piece.offset].decode(errors="ignore")
                part += [ids[: np.searchsorted(starts, end)], tokenizer.encode(between)]
                first = np.searchsorted(new_starts, start)
            ids, starts = new[first:], new_starts[first:]
            if piece.ends:
                part += [ids, [tokenizer.end_of_document]]
        yield parts


def _encode(batch: list[Piece], tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids of each piece and, if it is a window, the byte at which each of them begins."""
    texts = iter(tokenizer.encode_batch([piece.text for piece in batch if piece.whole]))
    windows = iter(tokenizer.encode_with_starts([piece.text for piece in batch if not piece.whole]))
    return [(np.asarray(next(texts)), NO_STARTS) if piece.whole else next(windows) for piece in batch]
