"""Prepares a corpus once: a folder with a tokenizer and one token file per split.

data = prepare(["python"], "sentencepiece", 2048, Path(".cache"), context=256)
inputs, targets = training_batch(data.train, seed=0, step=0, rows=range(32), context=256)
"""

import hashlib
import json
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.corpus import SPLITS, Corpus
from data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from files import explained, lock_file, read_json, sha256, write_atomically

FORMAT_VERSION = 5  # of a prepared folder; increase it whenever the same text would give different tokens
BATCH_CHARS = 1 << 20  # of text that is encoded at a time, in parallel
DOCUMENT_END = ""


@dataclass(frozen=True)
class Prepared:
    """A tokenized corpus.

    train, val: the ids of each document and the end-of-document id; memory-mapped, uint16 if they fit, else uint32.
    val_gzip_bpb: bits per byte of the validation text after `gzip -9`.
    """

    train: np.ndarray
    val: np.ndarray
    val_gzip_bpb: float
    tokenizer: Tokenizer
    corpus_name: str
    corpus_hash: str


def prepare(
    names: list[str], kind: str, vocab_size: int, cache_dir: Path, context: int, tokenizer: Tokenizer | None = None
) -> Prepared:
    """Tokenize the corpus behind `names`, or reuse the token files that an earlier run left in `cache_dir`.

    A `tokenizer` is used as it is. Otherwise one of that kind and size is trained; bytes need no training. Raises
    ValueError for an invalid corpus or vocabulary size and for a split shorter than one window of `context` + 1 tokens,
    and OSError, naming the file and its size, if the disk is full.
    """
    corpus = Corpus(names, cache_dir)
    _check_lengths(names, corpus.sizes, context)  # early: the size in bytes is an upper bound on the tokens
    if not tokenizer and kind == ByteTokenizer.kind:
        tokenizer = ByteTokenizer()
    if tokenizer:
        kind, vocab_size = tokenizer.kind, tokenizer.vocab_size
    made_from = (FORMAT_VERSION, corpus.hash, kind, vocab_size, tokenizer and tokenizer.hash)
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()
    folder = cache_dir / f"{corpus.name}-{kind}-{vocab_size}-{key[:12]}"
    prepared = _open(folder, corpus, tokenizer)
    if prepared is None:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with lock_file(folder.with_name(f"{folder.name}.lock"), wait=True):
            # Another process may have built it while this one waited.
            prepared = _open(folder, corpus, tokenizer) or _build(folder, corpus, vocab_size, tokenizer)
    _check_lengths(names, {"train": len(prepared.train), "val": len(prepared.val)}, context)
    return prepared


def _check_lengths(names: list[str], tokens: dict[str, int], context: int) -> None:
    for split in SPLITS:
        if tokens[split] <= context:
            text = "training" if split == "train" else "validation"
            part = f"--data {' '.join(names)}: the {text} text has at most {tokens[split]} tokens"
            advice = f"--context {context} needs {context + 1}; add text or lower --context"
            raise ValueError(f"{part}, but {advice}")


def _build(folder: Path, corpus: Corpus, vocab_size: int, tokenizer: Tokenizer | None) -> Prepared:
    """Write to a temporary folder, then rename it, so `folder` is complete as soon as it exists."""
    print(f"preparing {folder} from {sum(corpus.sizes.values()) / 1e3:,.0f} kB of text", file=sys.stderr)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir()
    try:
        if tokenizer is None:
            print(f"training a tokenizer with --vocab-size {vocab_size}", file=sys.stderr)
            tokenizer = train_tokenizer(chain.from_iterable(corpus.documents("train")), vocab_size)
            tokenizer.save(part)
        for split in SPLITS:
            _write_tokens(part / f"{split}.bin", corpus, split, tokenizer)
        record = {"tokenizer": tokenizer.hash, "val_gzip_bpb": _gzip_bpb(corpus.documents("val"))}
        if Corpus(corpus.names, folder.parent).hash != corpus.hash:
            raise ValueError(f"--data {' '.join(corpus.names)} changed while it was read; run the command again")
        write_atomically(part / "record.json", json.dumps(record | _hashes(part)))
        shutil.rmtree(folder, ignore_errors=True)  # exists only if it was damaged
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    prepared = _open(folder, corpus, tokenizer)
    assert prepared
    return prepared


def _open(folder: Path, corpus: Corpus, tokenizer: Tokenizer | None) -> Prepared | None:
    """Open a prepared folder, and the tokenizer in it unless one is given. None unless it is complete and intact."""
    try:
        tokenizer = tokenizer or load_tokenizer("sentencepiece", folder)
        record = read_json(folder / "record.json", dict)
        if record != record | {"tokenizer": tokenizer.hash} | _hashes(folder):
            return None
        train, val = (np.memmap(folder / f"{split}.bin", _dtype(tokenizer), mode="r") for split in SPLITS)
        return Prepared(train, val, record["val_gzip_bpb"], tokenizer, corpus.name, corpus.hash)
    except (OSError, ValueError, KeyError):
        return None


def _hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of the token files."""
    return {split: sha256(folder / f"{split}.bin") for split in SPLITS}


def _write_tokens(path: Path, corpus: Corpus, split: str, tokenizer: Tokenizer) -> None:
    """Encode a split into the file at `path`. The ids do not depend on the number of CPUs."""
    dtype = _dtype(tokenizer)
    bar = tqdm(total=corpus.sizes[split], unit="B", unit_scale=True, desc=f"encoding {split}", disable=None)
    with explained(path, corpus.sizes[split] * dtype.itemsize), open(path, "wb") as file, bar:
        for batch in _batches(corpus.documents(split)):
            encoded = zip(batch, tokenizer.encode_batch(batch), strict=True)
            ids = [[tokenizer.end_of_document] if chunk == DOCUMENT_END else tokens for chunk, tokens in encoded]
            file.write(np.concatenate([[], *ids], dtype=dtype, casting="unsafe").tobytes())
            bar.update(len("".join(batch).encode()))


def _gzip_bpb(documents: Iterable[Iterable[str]]) -> float:
    """Bits per byte after `gzip -9`."""
    compressor = zlib.compressobj(9, wbits=31)
    size = compressed = 0
    for data in map(str.encode, chain.from_iterable(documents)):
        size += len(data)
        compressed += len(compressor.compress(data))
    return 8 * (compressed + len(compressor.flush())) / max(size, 1)


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _batches(documents: Iterable[Iterable[str]]) -> Iterator[list[str]]:
    """The chunks of all documents in lists of about 1 MiB, with DOCUMENT_END after each document."""
    batch = []
    size = 0
    for chunk in chain.from_iterable(chain(filter(None, document), [DOCUMENT_END]) for document in documents):
        batch.append(chunk)
        size += len(chunk)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    yield batch
