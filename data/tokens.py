"""Token files: a header that describes the tokens of a split, then the ids.

The header is 1024 bytes: a line that names the format, then JSON, then zeros. It is written last, so a truncated file
is never mistaken for a complete one.
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
    """Encode a split into the file at `path`, chunk by chunk."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    bar = tqdm(total=corpus.sizes[split], unit="B", unit_scale=True, desc=f"encoding {split}", disable=None)
    compressor = zlib.compressobj(9, wbits=31)  # same as gzip -9
    text_bytes, gzip_bytes = 0, 0
    with open(path, "wb") as file, bar:
        file.write(bytes(HEADER_BYTES))
        for document in corpus.documents(split):
            for text in document:
                np.array(tokenizer.encode(text), dtype).tofile(file)
                data = text.encode()
                if split == "val":
                    gzip_bytes += len(compressor.compress(data))
                text_bytes += len(data)
                bar.update(len(data))
            np.array([tokenizer.end_of_document], dtype).tofile(file)
        header = {
            "dtype": dtype.str,
            "count": (file.tell() - HEADER_BYTES) // dtype.itemsize,
            "tokenizer": tokenizer.hash,
            "corpus": corpus.hash,
            "text_bytes": text_bytes,
            "gzip_bytes": gzip_bytes + len(compressor.flush()) if split == "val" else 0,
        }
        file.seek(0)
        file.write(MAGIC + json.dumps(header).encode())


def open_tokens(path: Path, corpus: Corpus, tokenizer: Tokenizer) -> TokenFile:
    """Memory-map a token file. Raises NotPrepared unless it is complete and made from this corpus and tokenizer."""
    try:
        with open(path, "rb") as file:
            raw = file.read(HEADER_BYTES)
        magic, header = raw[: len(MAGIC)], json.loads(raw[len(MAGIC) :].rstrip(b"\0"))
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise NotPrepared from error
    dtype = np.dtype(header["dtype"])
    expected_size = HEADER_BYTES + header["count"] * dtype.itemsize
    if (magic, size, header["tokenizer"], header["corpus"]) != (MAGIC, expected_size, tokenizer.hash, corpus.hash):
        raise NotPrepared
    tokens = np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(header["count"],))
    return TokenFile(tokens, header["text_bytes"], header["gzip_bytes"])
