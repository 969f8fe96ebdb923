"""The file of a split's tokens: a header that says what they are, then the ids.

The header is 1024 bytes: a line that names the format, then JSON, then zeros. It is written last, so that a file that
was cut off is never taken for a whole one.
"""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.corpus import Corpus, Split
from data.tokenizer import Tokenizer

MAGIC = b"normal-llama tokens\n"
HEADER_BYTES = 1024


class NotPrepared(Exception):
    """A file of tokens is not there, or is damaged, or of another text or tokenizer."""


@dataclass(frozen=True)
class TokenFile:
    """The ids of a split, one document after the other, each closed by the end-of-document id.

    tokens: memory-mapped, uint16 if the vocabulary fits, else uint32.
    text_bytes: length of the text in UTF-8.
    gzip_bytes: what `gzip -9` makes of it; not counted, and 0, for training text.
    """

    tokens: np.ndarray
    text_bytes: int
    gzip_bytes: int


def write_tokens(path: Path, corpus: Corpus, split: Split, tokenizer: Tokenizer) -> None:
    """Encode a split into the file at `path`, a chunk at a time."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    bar = tqdm(total=corpus.sizes[split], unit="B", unit_scale=True, desc=f"encoding {split}", disable=None)
    packer = zlib.compressobj(9, wbits=31)  # what gzip -9 does
    text_bytes, gzip_bytes = 0, 0
    with open(path, "wb") as file, bar:
        file.write(bytes(HEADER_BYTES))
        for document in corpus.documents(split):
            for text in document:
                np.array(tokenizer.encode(text), dtype).tofile(file)
                data = text.encode()
                if split == "val":
                    gzip_bytes += len(packer.compress(data))
                text_bytes += len(data)
                bar.update(len(data))
            np.array([tokenizer.end_of_document], dtype).tofile(file)
        header = {
            "dtype": dtype.str,
            "count": (file.tell() - HEADER_BYTES) // dtype.itemsize,
            "tokenizer": tokenizer.hash,
            "corpus": corpus.hash,
            "text_bytes": text_bytes,
            "gzip_bytes": gzip_bytes + len(packer.flush()) if split == "val" else 0,
        }
        file.seek(0)
        file.write(MAGIC + json.dumps(header).encode())


def open_tokens(path: Path, corpus: Corpus, tokenizer: Tokenizer) -> TokenFile:
    """Map the file at `path`. Raises NotPrepared unless it is whole, and of this corpus and this tokenizer."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER_BYTES)
        magic, header = head[: len(MAGIC)], json.loads(head[len(MAGIC) :].rstrip(b"\0"))
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise NotPrepared from error
    dtype = np.dtype(header["dtype"])
    whole = HEADER_BYTES + header["count"] * dtype.itemsize
    if (magic, size, header["tokenizer"], header["corpus"]) != (MAGIC, whole, tokenizer.hash, corpus.hash):
        raise NotPrepared
    tokens = np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(header["count"],))
    return TokenFile(tokens, header["text_bytes"], header["gzip_bytes"])
