"""Encodes a corpus into token files, on all CPUs. What a process that was stopped has done is not done again."""

import json
import os
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import cycle, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data.corpus import SPLITS, Corpus, progress_bar
from data.tokenizer import ByteTokenizer, Ids, Tokenizer
from files import explained, read_json, write_atomically

# Characters. A document of up to WHOLE is encoded as one text, a longer one in windows that overlap.
WHOLE, WINDOW, OVERLAP = 1 << 24, 1 << 18, 1 << 13
BATCH_CHARS = 1 << 20  # that are encoded at a time; at least two windows
WORKERS_FROM = 1 << 26  # bytes of text; less is encoded in this process, by the threads of the tokenizer's library
SAVE_EVERY = 30  # seconds between records of what is done
PROGRESS = "progress.json"


def write_tokens(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> float:
    """Write `train.bin` and `val.bin`, and return the bits per byte of the validation text after `gzip -9`.

    A document is the ids that begin a prompt (unless only its end is in this split), those of its text, and the
    end-of-document id. The ids depend neither on the number of processes nor on where an earlier one was stopped.
    """
    dtype, total, gzip = token_dtype(tokenizer), sum(corpus.sizes.values()), Gzip()
    progress, saved = _read_progress(folder), time.monotonic()
    with ExitStack() as stack:
        files = {split: stack.enter_context(open(folder / f"{split}.bin", "ab", buffering=0)) for split in SPLITS}
        for split, file in files.items():
            file.truncate(progress[split])
        bar = stack.enter_context(progress_bar("encoding", total))
        batches = _batches(corpus, gzip, bar)
        first = max(progress["done"] - 1, 0)  # the last one is encoded again, for the window at its end
        deque(islice(batches, first), maxlen=0)
        bar.initial = bar.n
        for number, parts in enumerate(_join(_encode_all(batches, tokenizer, total), tokenizer), first + 1):
            if number <= progress["done"]:
                continue
            for split, file in files.items():
                data = np.concatenate([[], *parts[split]], dtype=dtype, casting="unsafe").tobytes()
                progress[split] += len(data)
                with explained(Path(file.name), corpus.sizes[split] * dtype.itemsize):
                    while data:
                        data = data[file.write(data) :]
            progress["done"] = number
            if time.monotonic() - saved >= SAVE_EVERY:
                for file in files.values():
                    os.fsync(file.fileno())
                write_atomically(folder / PROGRESS, json.dumps(progress))
                saved = time.monotonic()
    return gzip.bits_per_byte()


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _read_progress(folder: Path) -> dict[str, int]:
    """How many batches are done, and the bytes that each token file had then."""
    with suppress(OSError, ValueError, KeyError):
        progress = read_json(folder / PROGRESS, dict[str, int])
        if all((folder / f"{split}.bin").stat().st_size >= progress[split] for split in SPLITS):
            return progress
    return dict.fromkeys(("done", *SPLITS), 0)


class Gzip:
    """The size of text after `gzip -9`."""

    def __init__(self) -> None:
        self.compressor = zlib.compressobj(9, wbits=31)
        self.size = self.compressed = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self.compressed += len(self.compressor.compress(data))

    def bits_per_byte(self) -> float:
        return 8 * (self.compressed + len(self.compressor.flush())) / max(self.size, 1)


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


def _batches(corpus: Corpus, gzip: Gzip, bar: tqdm) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    chars = 0
    for piece in _pieces(corpus, gzip, bar):
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    yield batch


def _pieces(corpus: Corpus, gzip: Gzip, bar: tqdm) -> Iterator[Piece]:
    """The corpus in order. All validation text goes to `gzip`."""
    for split, begins, chunks in corpus.parts():
        offset, text = 0, ""
        for chunk in chunks:
            data = chunk.encode()
            bar.update(len(data))
            if split == "val":
                gzip.add(data)
            text += chunk
            while len(text) > (WINDOW + OVERLAP if offset else WHOLE):
                yield Piece(split, begins and not offset, False, offset, text[: WINDOW + OVERLAP])
                offset += len(text[:WINDOW].encode())
                text = text[WINDOW:]
        yield Piece(split, begins and not offset, True, offset, text)


def _join(encoded: Iterator[tuple[list[Piece], list]], tokenizer: Tokenizer) -> Iterator[dict[str, list[Ids]]]:
    """What comes next in each split, batch by batch."""
    none = np.empty(0, np.int64)
    ids, starts = none, none  # of the last window, and the byte at which each of them begins
    for batch, found in encoded:
        parts: dict[str, list[Ids]] = {split: [] for split in SPLITS}
        for piece, new in zip(batch, found, strict=True):
            part = parts[piece.split]
            if piece.begins:
                part.append(tokenizer.prompt_start)
            if piece.whole:
                ids = new
            else:
                before, ids, starts = _next_window(ids, starts, piece, new[0], new[1], tokenizer)
                part += before
            if piece.ends:
                part += [ids, [tokenizer.end_of_document]]
                ids, starts = none, none
        yield parts


def _next_window(
    ids: np.ndarray, starts: np.ndarray, piece: Piece, new_ids: np.ndarray, new_starts: np.ndarray, tokenizer: Tokenizer
) -> tuple[list[Ids], np.ndarray, np.ndarray]:
    """The ids before the next window, and what follows: one gives way to the other where both begin a token.

    That is in the middle of their overlap, far from both ends, where a text that goes on may have other tokens.
    """
    new_starts, between = new_starts + piece.offset, list[int]()
    overlap = starts[starts >= piece.offset]
    common = np.intersect1d(overlap, new_starts[: 4 * OVERLAP])  # at most 4 bytes a character
    end = start = common[len(common) // 2] if len(common) else piece.offset
    if len(overlap) and not len(common):  # text that repeats itself: what is between two tokens is encoded alone
        data, end = piece.text.encode(), overlap[0]
        start = min([*new_starts[new_starts >= end], piece.offset + len(data)])
        between = tokenizer.encode(data[end - piece.offset : start - piece.offset].decode(errors="ignore"))
    kept = np.searchsorted(new_starts, start)
    return [ids[: np.searchsorted(starts, end)], between], new_ids[kept:], new_starts[kept:]


# --- encoding, in this process or in several -------------------------------------------------------------------------


def _encode_all(batches: Iterator[list[Piece]], tokenizer: Tokenizer, size: int) -> Iterator[tuple[list[Piece], list]]:
    """Pairs of each batch and what it encodes to, in order. For much text there is a process for each CPU."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1  # Windows passes no pipes
    if tokenizer.kind == ByteTokenizer.kind or size < WORKERS_FROM or count == 1:
        yield from ((batch, _encode(batch, tokenizer)) for batch in batches)
        return
    # Processes of `multiprocessing` would import train.py with torch, and outlive this one if it is killed.
    workers, busy = [], deque[tuple[Any, list[Piece]]]()
    start = partial(subprocess.Popen, cwd=Path(__file__).parents[1], start_new_session=True)
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    try:
        for _ in range(count):
            worker, theirs = Pipe()
            command = [sys.executable, "-m", "data.encoding", str(theirs.fileno())]
            workers.append((worker, start(command, pass_fds=[theirs.fileno()], env=environment)))
            theirs.close()
            worker.send(tokenizer)
        for batch, (worker, _) in zip(batches, cycle(workers), strict=False):
            if len(busy) == count:
                yield busy[0][1], busy.popleft()[0].recv()
            worker.send(batch)
            busy.append((worker, batch))
        for worker, batch in busy:
            yield batch, worker.recv()
    except (EOFError, ConnectionError):
        raise OSError("a process that encodes text was killed; run the command again, it goes on from there") from None
    finally:
        for worker, process in workers:
            worker.close()
            process.kill()
            process.wait()


def _encode(batch: list[Piece], tokenizer: Tokenizer) -> list:
    """The ids of each piece, and the byte at which each of them begins if it is a window."""
    texts = iter(tokenizer.encode_batch([piece.text for piece in batch if piece.whole]))
    windows = iter(tokenizer.encode_with_starts([piece.text for piece in batch if not piece.whole]))
    return [np.asarray(next(texts)) if piece.whole else next(windows) for piece in batch]


def _serve(connection: Connection) -> None:
    """Encode the batches that come, with the tokenizer that comes first, until the other process ends."""
    with suppress(EOFError, ConnectionError):
        tokenizer = connection.recv()
        tokenizer.threads = 1
        while True:
            connection.send(_encode(connection.recv(), tokenizer))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
