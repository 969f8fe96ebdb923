"""Prepares a corpus once: a folder with a tokenizer and one token file per split.

data = prepare(["python"], "sentencepiece", 2048, Path(".cache"), context=256)
inputs, targets = training_batch(data.train, seed=0, step=0, rows=range(32), context=256)
"""

import hashlib
import json
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.corpus import SPLITS, Corpus
from data.tokenizer import ByteTokenizer, Ids, Tokenizer, load_tokenizer, train_tokenizer
from files import explained, lock_file, read_json, sha256, write_atomically

FORMAT_VERSION = 6  # Increase it whenever the same text would give different tokens.
BATCH_CHARS = 1 << 20  # characters of the documents that are encoded at a time, in parallel
# Characters. A document of up to WHOLE is encoded as one text, a longer one in windows that overlap.
WHOLE, WINDOW, OVERLAP = 1 << 24, 1 << 18, 1 << 13
WINDOWS = 8  # windows that are encoded at a time, in parallel


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
    names: list[str],
    kind: str,
    vocab_size: int,
    cache_dir: Path,
    context: int,
    tokenizer: Tokenizer | None = None,
    val_names: Sequence[str] = (),
    column: str = "text",
) -> Prepared:
    """Tokenize the corpus behind `names`, or reuse the token files that an earlier run left in `cache_dir`.

    `val_names` and `column` are those of `Corpus`. A `tokenizer` is used as it is. Otherwise one of that kind and size
    is trained; bytes need no training. Raises ValueError for an invalid corpus or vocabulary size and for a split
    shorter than one window of `context` + 1 tokens, and OSError, naming the file and its size, if the disk is full.
    """
    corpus = Corpus(names, cache_dir, val_names, column)
    _check_lengths(corpus, corpus.sizes, context)  # early: the size in bytes is an upper bound on the tokens
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
    _check_lengths(corpus, {"train": len(prepared.train), "val": len(prepared.val)}, context)
    return prepared


def _check_lengths(corpus: Corpus, tokens: dict[str, int], context: int) -> None:
    if not corpus.names:  # text to evaluate on, for which shorter windows do
        return
    for split in SPLITS:
        if tokens[split] <= context:
            named = split == "val" and corpus.val_names
            source = " ".join(["--val-data", *corpus.val_names] if named else ["--data", *corpus.names])
            text = "training" if split == "train" else "validation"
            part = f"{source}: the {text} text has at most {tokens[split]} tokens"
            advice = f"--context {context} needs {context + 1}; add text or lower --context"
            raise ValueError(f"{part}, but {advice}")


def _build(folder: Path, corpus: Corpus, vocab_size: int, tokenizer: Tokenizer | None) -> Prepared:
    """Write to a temporary folder, then rename it, so `folder` is complete as soon as it exists."""
    print(f"preparing {folder} from {sum(corpus.sizes.values()) / 1e3:,.0f} kB of text", file=sys.stderr)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
    part.mkdir()
    try:
        if tokenizer is None:
            print(f"training a tokenizer with --vocab-size {vocab_size}", file=sys.stderr)
            tokenizer = train_tokenizer(corpus.chunks("train"), vocab_size)
            tokenizer.save(part)
        for split in SPLITS:
            _write_tokens(part / f"{split}.bin", corpus, split, tokenizer)
        record = {"tokenizer": tokenizer.hash, "val_gzip_bpb": _gzip_bpb(corpus.chunks("val"))}
        if Corpus(corpus.names, folder.parent, corpus.val_names, corpus.column).hash != corpus.hash:
            raise ValueError(f"the text of {corpus.name} changed while it was read; run the command again")
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
        train, val = (_map(folder / f"{split}.bin", _dtype(tokenizer)) for split in SPLITS)
        return Prepared(train, val, record["val_gzip_bpb"], tokenizer, corpus.name, corpus.hash)
    except (OSError, ValueError, KeyError):
        return None


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of the token files."""
    return {split: sha256(folder / f"{split}.bin") for split in SPLITS}


def _write_tokens(path: Path, corpus: Corpus, split: str, tokenizer: Tokenizer) -> None:
    """Encode a split into the file at `path`. The ids do not depend on the number of CPUs."""
    dtype = _dtype(tokenizer)
    bar = tqdm(total=corpus.sizes[split], unit="B", unit_scale=True, desc=f"encoding {split}", disable=None)

    def counted(chunk: str) -> str:
        bar.update(len(chunk.encode()))
        return chunk

    documents = ((begins, map(counted, chunks)) for begins, chunks in corpus.documents(split))
    with explained(path, corpus.sizes[split] * dtype.itemsize), open(path, "wb") as file, bar:
        for parts in _encoded(documents, tokenizer):
            file.write(np.concatenate([[], *parts], dtype=dtype, casting="unsafe").tobytes())


def _encoded(documents: Iterable[tuple[bool, Iterator[str]]], tokenizer: Tokenizer) -> Iterator[list[Ids]]:
    """The ids of documents, in lists of parts."""
    batch: list[tuple[bool, str]] = []
    size = 0
    for begins, chunks in documents:
        text = _take(chunks, WHOLE)
        if len(text) <= WHOLE:
            batch.append((begins, text))
            size += len(text)
        if size >= BATCH_CHARS or len(text) > WHOLE:
            yield _encode(batch, tokenizer)
            batch, size = [], 0
        if len(text) > WHOLE:
            yield [tokenizer.prompt_start if begins else []]
            yield from ([ids] for ids in _encode_long(chain([text], chunks), tokenizer))
            yield [[tokenizer.end_of_document]]
    yield _encode(batch, tokenizer)


def _encode(batch: list[tuple[bool, str]], tokenizer: Tokenizer) -> list[Ids]:
    """The ids of texts, each with the end of a document, and after what a prompt begins with if its document begins."""
    encoded = zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True)
    parts = (
        (tokenizer.prompt_start if begins else [], ids, [tokenizer.end_of_document]) for (begins, _), ids in encoded
    )
    return list(chain.from_iterable(parts))


def _take(chunks: Iterator[str], size: int) -> str:
    """The text of the next chunks, until it has more than `size` characters."""
    taken, length = [], 0
    for chunk in chunks:
        taken.append(chunk)
        length += len(chunk)
        if length > size:
            break
    return "".join(taken)


def _encode_long(chunks: Iterator[str], tokenizer: Tokenizer) -> Iterator[Ids]:
    """The ids of a document, window by window. One gives way to the next where both begin a token in their overlap."""
    windows = _windows(chunks)
    ids, starts = np.array([], int), np.array([], int)
    while group := list(islice(windows, WINDOWS)):
        encoded = tokenizer.encode_with_starts([text for _, text in group])
        for (offset, text), (next_ids, next_starts) in zip(group, encoded, strict=True):
            overlap = starts[starts >= offset]
            common = np.intersect1d(overlap, next_starts[: 4 * OVERLAP] + offset)  # at most 4 bytes a character
            if len(overlap) and not len(common):  # text that repeats itself: begin where a token does
                rest = text.encode()[overlap[0] - offset :].decode(errors="ignore")
                offset = int(overlap[0])
                ((next_ids, next_starts),) = tokenizer.encode_with_starts([rest])
                common = np.intersect1d(overlap, next_starts[: 4 * OVERLAP] + offset)
            # The middle is far from both ends, where a text that goes on may have other tokens.
            cut = common[len(common) // 2] if len(common) else offset
            kept = np.searchsorted(next_starts + offset, cut)
            yield ids[: np.searchsorted(starts, cut)]
            ids, starts = next_ids[kept:], next_starts[kept:] + offset
    yield ids


def _windows(chunks: Iterator[str]) -> Iterator[tuple[int, str]]:
    """The windows of a text, each with the byte at which it begins."""
    offset, text = 0, ""
    for chunk in chunks:
        text += chunk
        while len(text) > WINDOW + OVERLAP:
            yield offset, text[: WINDOW + OVERLAP]
            offset += len(text[:WINDOW].encode())
            text = text[WINDOW:]
    yield offset, text


def _gzip_bpb(chunks: Iterable[str]) -> float:
    """Bits per byte after `gzip -9`."""
    compressor = zlib.compressobj(9, wbits=31)
    size = compressed = 0
    for data in map(str.encode, chunks):
        size += len(data)
        compressed += len(compressor.compress(data))
    return 8 * (compressed + len(compressor.flush())) / max(size, 1)


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
