"""Token files: a header that describes the tokens of a split, then the ids.

The header is 1024 bytes: a line that names the format, then JSON, then zeros. It is written last, so a truncated file
is never mistaken for a complete one. Until then the header of a long file says, under another name, how much of it is
done, so that a preparation that was killed can go on from there. Its CRC-32 is of the ids and of the other fields.
"""

import json
import os
import zlib
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from data.corpus import Corpus, Split
from data.tokenizer import ByteTokenizer, Tokenizer
from data.workers import JOB_BYTES, MAX_WORKERS, available_cpus, encode_jobs, make_jobs, text_of

MAGIC, UNFINISHED = b"normal-llama tokens\n", b"normal-llama unfinished tokens\n"
HEADER_BYTES = 1024
CHUNK_BYTES = 1 << 20  # of ids that are checked at a time
SAVE_BYTES = 32 << 20  # of ids between two saves of a file's progress
PARALLEL_BYTES = 16_000_000  # of text from which more processes are worth their start


class NotPrepared(Exception):
    """A token file is missing, damaged, or made from a different text or tokenizer."""


@dataclass(frozen=True)
class TokenFile:
    """The ids of a split's documents, each followed by the end-of-document id.

    tokens: memory-mapped, uint16 if the vocabulary fits, else uint32.
    text_bytes: size of the text in UTF-8.
    gzip_bytes: size of the text after `gzip -9`; 0 for training text, for which it is not computed.
    """

    tokens: np.ndarray
    text_bytes: int
    gzip_bytes: int


def write_tokens(path: Path, corpus: Corpus, split: Split, tokenizer: Tokenizer) -> None:
    """Encode a split into the file at `path`, or continue where an earlier call was stopped.

    The file is the same, whether it was stopped or not, and however many processes encode. Raises ChildProcessError
    if one of them is killed.
    """
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    made_from = {"dtype": dtype.str, "tokenizer": tokenizer.hash, "corpus": corpus.hash}
    done, count, crc = _progress(path, made_from)
    bar = tqdm(total=corpus.sizes[split], unit="B", unit_scale=True, desc=f"encoding {split}", disable=None)
    compressor = zlib.compressobj(9, wbits=31)  # same as gzip -9
    text_bytes, gzip_bytes, unsaved = 0, 0, 0
    jobs = make_jobs(corpus.documents(split))
    encoded = encode_jobs(jobs, tokenizer, dtype, _worker_count(corpus.sizes[split], tokenizer))
    with open(path, "r+b" if done else "wb") as file, bar, closing(encoded):
        file.truncate(HEADER_BYTES + count * dtype.itemsize)
        file.seek(0, os.SEEK_END)
        # What an earlier call encoded is read again, and validation text compressed again, but not encoded again.
        for number, (job, ids) in enumerate(chain(((job, b"") for job in islice(jobs, done)), encoded), 1):
            file.write(ids)
            crc = zlib.crc32(ids, crc)
            count += len(ids) // dtype.itemsize
            text = text_of(job)
            if split == "val":
                gzip_bytes += len(compressor.compress(text))
            text_bytes += len(text)
            unsaved += len(ids)
            bar.update(len(text))
            if unsaved >= SAVE_BYTES:
                progress = {"count": count, "jobs": number, "job_bytes": JOB_BYTES}
                _write_header(file, UNFINISHED, made_from | progress, crc)
                unsaved = 0
        if split == "val":
            gzip_bytes += len(compressor.flush())
        sizes = {"text_bytes": text_bytes, "gzip_bytes": gzip_bytes}
        _write_header(file, MAGIC, {"dtype": dtype.str, "count": count} | made_from | sizes, crc)


def _worker_count(text_bytes: int, tokenizer: Tokenizer) -> int:
    """How many processes are worth starting. The byte tokenizer is faster than a pipe to another process."""
    if text_bytes < PARALLEL_BYTES or isinstance(tokenizer, ByteTokenizer):
        return 1
    return min(available_cpus(), MAX_WORKERS)


def _progress(path: Path, made_from: dict[str, str]) -> tuple[int, int, int]:
    """The jobs that an earlier call has encoded into the file at `path`, the number of their ids and their CRC-32."""
    try:
        header, crc = _read_header(path, UNFINISHED)
    except NotPrepared:
        return 0, 0, 0
    if not header.items() >= (made_from | {"job_bytes": JOB_BYTES}).items():
        return 0, 0, 0
    return header["jobs"], header["count"], crc


def _write_header(file: BinaryIO, magic: bytes, header: dict[str, Any], crc: int) -> None:
    """Write the header once the ids before it are on the disk, and return to the end of the file.

    `crc` is the CRC-32 of the ids.
    """
    file.flush()
    os.fsync(file.fileno())
    file.seek(0)
    fields = json.dumps(header | {"crc32": zlib.crc32(json.dumps(header).encode(), crc)})
    file.write((magic + fields.encode()).ljust(HEADER_BYTES, b"\0"))
    file.flush()
    file.seek(0, os.SEEK_END)


def _read_header(path: Path, magic: bytes) -> tuple[dict[str, Any], int]:
    """The fields of the header, and the CRC-32 of the ids. Raises NotPrepared unless they are what was written."""
    try:
        if not path.is_file():
            raise NotPrepared
        with open(path, "rb") as file:
            line, _, fields = file.read(HEADER_BYTES).partition(b"\n")
            header = json.loads(fields.rstrip(b"\0"))
            expected, unread, crc = header.pop("crc32"), header["count"] * np.dtype(header["dtype"]).itemsize, 0
            while chunk := file.read(min(unread, CHUNK_BYTES)):
                crc = zlib.crc32(chunk, crc)
                unread -= len(chunk)
            longer = magic == MAGIC and file.read(1)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NotPrepared from error
    if line + b"\n" != magic or unread or longer or zlib.crc32(json.dumps(header).encode(), crc) != expected:
        raise NotPrepared
    return header, crc


def open_tokens(path: Path, corpus: Corpus, tokenizer: Tokenizer) -> TokenFile:
    """Memory-map a token file. Raises NotPrepared unless it is complete and made from this corpus and tokenizer."""
    header, _ = _read_header(path, MAGIC)
    if (header["tokenizer"], header["corpus"]) != (tokenizer.hash, corpus.hash):
        raise NotPrepared
    tokens = map_tokens(path, header["dtype"], header["count"])
    return TokenFile(tokens, header["text_bytes"], header["gzip_bytes"])


def map_tokens(path: Path, dtype: str, count: int) -> np.ndarray:
    """The ids in a token file, memory-mapped."""
    return np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(count,))
