"""Encodes a corpus into token files, on all CPUs. What a process that was stopped has done is not done again."""

import json
import os
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.corpus import Corpus, progress_bar
from data.token_files import SPLITS
from data.tokenizer import ByteTokenizer, Ids, Tokenizer
from files import explained, read_json, sync, write_atomically

# Characters. A document of up to WHOLE is encoded as one text, a longer one in windows that overlap.
WHOLE, WINDOW, OVERLAP = 1 << 24, 1 << 18, 1 << 13
BATCH_CHARS = 1 << 20  # encoded at a time; at least two windows
WORKERS_FROM = 1 << 26  # bytes of text; less is encoded in this process, by the threads of the tokenizer's library
SAVE_EVERY = 30  # seconds between records of what is done
PROGRESS = "progress.json"
NO_STARTS = np.empty(0, np.int64)


def write_tokens(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> float:
    """Write `train.bin` and `val.bin`, and return the bits per byte of the validation text after `gzip -9`.

    A document is the ids that begin a prompt (unless only its end is in this split), those of its text, and the
    end-of-document id. The ids depend neither on the number of processes nor on where an earlier one was stopped.
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
        joined = _join(_encode_all(batches, tokenizer, total), tokenizer)
        for parts in islice(joined, progress["done"] - first, None):
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


def _join(encoded: Iterator[tuple[list[Piece], list]], tokenizer: Tokenizer) -> Iterator[dict[str, list[Ids]]]:
    """What comes next in each split, batch by batch.

    One window gives way to the next where both begin a token. That is in the middle of their overlap, far from both
    ends, where a text that goes on may have other tokens.
    """
    ids = starts = NO_STARTS  # ids of the last window, and the byte where each begins
    for batch, found in encoded:
        parts: dict[str, list[Ids]] = {split: [] for split in SPLITS}
        for piece, (new, new_starts) in zip(batch, found, strict=True):
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


# --- encoding, in this process or in several -------------------------------------------------------------------------


def _encode_all(batches: Iterator[list[Piece]], tokenizer: Tokenizer, size: int) -> Iterator[tuple[list[Piece], list]]:
    """Pairs of each batch and what it encodes to, in order. For much text there is a process for each CPU."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1  # Windows passes no pipes
    if tokenizer.kind == ByteTokenizer.kind or size < WORKERS_FROM or count == 1:
        yield from ((batch, _encode(batch, tokenizer)) for batch in batches)
        return
    # Processes of `multiprocessing` would import train.py with torch, and outlive this one if it is killed.
    command, root = [sys.executable, "-m", "data.encoding"], Path(__file__).parents[1]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    processes, workers, busy = [], [], deque[tuple[list[Piece], Connection]]()
    try:
        for _ in range(count):
            worker, theirs = Pipe()
            workers.append(worker)
            with theirs:
                process = subprocess.Popen(
                    command, stdin=theirs.fileno(), cwd=root, env=environment, start_new_session=True
                )
            processes.append(process)
            worker.send(tokenizer)
        for batch, worker in zip(batches, cycle(workers), strict=False):
            if len(busy) == count:
                earlier, first = busy.popleft()
                yield earlier, first.recv()
            worker.send(batch)
            busy.append((batch, worker))
        for batch, worker in busy:
            yield batch, worker.recv()
    except (EOFError, ConnectionError):
        raise OSError("a process that encodes text was killed; run the command again, it goes on from there") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _encode(batch: list[Piece], tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids of each piece and, if it is a window, the byte at which each of them begins."""
    texts = iter(tokenizer.encode_batch([piece.text for piece in batch if piece.whole]))
    windows = iter(tokenizer.encode_with_starts([piece.text for piece in batch if not piece.whole]))
    return [(np.asarray(next(texts)), NO_STARTS) if piece.whole else next(windows) for piece in batch]


if __name__ == "__main__":  # encodes the batches that come, with the tokenizer that comes first
    with suppress(EOFError, ConnectionError):
        others = Connection(sys.stdin.fileno())
        ours = others.recv()
        ours.threads = 1
        while True:
            others.send(_encode(others.recv(), ours))
