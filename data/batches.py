"""Prepares a corpus once, as one token file per split, and serves the windows a model is trained on.

data = prepare(["python"], "sentencepiece", 2048, Path(".cache"), context=256)
inputs, targets = training_batch(data.train.tokens, seed=0, step=0, rows=range(32), context=256)
"""

import errno
import hashlib
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.corpus import SPLITS, Corpus, Split, open_corpus
from data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from data.tokens import HEADER_BYTES, NotPrepared, TokenFile, open_tokens, write_tokens

try:
    import fcntl
except ImportError:  # fcntl is missing on Windows: locking is skipped there
    fcntl = None  # type: ignore[assignment]

MAX_TOKEN_BYTES = 4  # of an id in a token file
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # full, over a quota, or over a limit of the file size
FORMAT_VERSION = 3  # of a prepared folder; increase it whenever the same text would give different tokens


@dataclass(frozen=True)
class Prepared:
    """A tokenized corpus.

    val_bytes: size of the validation text in UTF-8, the denominator of bits per byte.
    val_gzip_bytes: size of the validation text after `gzip -9`.
    """

    train: TokenFile
    val: TokenFile
    tokenizer: Tokenizer
    corpus_name: str
    corpus_hash: str
    val_bytes: int
    val_gzip_bytes: int

    @property
    def val_gzip_bpb(self) -> float:
        """Bits per byte of the validation text after `gzip -9`."""
        return 8 * self.val_gzip_bytes / self.val_bytes


def prepare(
    names: list[str],
    tokenizer_kind: str,
    vocab_size: int,
    cache_dir: Path,
    context: int,
    tokenizer: Tokenizer | None = None,
    earlier_cache: Path | None = None,
) -> Prepared:
    """Tokenize the corpus behind `names`, or reuse the token files an earlier run left in `cache_dir`.

    Those in `earlier_cache` are reused too, and nothing is written there. With a `tokenizer`, it is used as it is, and
    `tokenizer_kind` and `vocab_size` are ignored. Otherwise one of that kind and size is trained; the byte tokenizer
    has 257 ids whatever `vocab_size` says.

    Raises ValueError for an invalid corpus or vocabulary size, and for a split shorter than one window of
    `context` + 1 tokens.
    """
    if tokenizer:
        tokenizer_kind, vocab_size = tokenizer.kind, tokenizer.vocab_size
    elif tokenizer_kind == ByteTokenizer.kind:
        vocab_size = ByteTokenizer.vocab_size
    corpus = open_corpus(names, cache_dir, earlier_cache)
    for split in SPLITS:  # checked early: the size in bytes is an upper bound on the tokens
        _check_length(split, names, corpus.sizes[split], context)
    made_from = (FORMAT_VERSION, corpus.hash, tokenizer_kind, vocab_size, *([tokenizer.hash] if tokenizer else []))
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()
    name = f"{corpus.name}-{tokenizer_kind}-{vocab_size}-{key[:12]}"
    folder, caches = cache_dir / name, dict.fromkeys((earlier_cache or cache_dir, cache_dir))
    try:
        prepared = _open_first([cache / name for cache in caches], corpus, tokenizer_kind, tokenizer)
    except NotPrepared:
        with _locked(folder):
            _refuse_links(folder, _part(folder), *_part(folder).glob("*"))
            try:  # another process may have built it while this one waited
                prepared = _open(folder, corpus, tokenizer_kind, tokenizer)
            except NotPrepared:
                with _space_returned(folder, corpus):
                    _build(folder, corpus, tokenizer_kind, vocab_size, tokenizer)
                prepared = _open(folder, corpus, tokenizer_kind, tokenizer)
    for split in SPLITS:
        _check_length(split, names, len(getattr(prepared, split).tokens), context)
    return prepared


def _check_length(split: Split, names: list[str], tokens: int, context: int) -> None:
    if tokens < context + 1:
        part = {"train": "training", "val": "validation"}[split]
        raise ValueError(
            f"--data {' '.join(names)}: the {part} text has at most {tokens} tokens, but --context {context} "
            f"needs {context + 1}; add text or lower --context"
        )


# --- batches ----------------------------------------------------------------------------------------------------------


def training_batch(tokens: np.ndarray, seed: int, step: int, rows: range, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (rows, context): the given rows of a step's global batch."""
    return _windows(tokens, row_starts(tokens, seed, step, rows, context), context)


def row_starts(tokens: np.ndarray, seed: int, step: int, rows: range, context: int) -> np.ndarray:
    """The index in `tokens` of the first input of each of the given rows.

    Each row is a window that starts at a uniformly random token. It depends only on the seed, the step and its row
    index, not on which other rows are requested.
    """
    draws = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(rows.stop)[rows.start : rows.stop]
    return draws % np.uint64(len(tokens) - context)


def evaluation_batches(
    tokens: np.ndarray, context: int, batch_size: int, max_tokens: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, int64 (up to batch_size, context), from adjacent windows.

    Every token except the first is a target exactly once; the remainder is a final batch of one shorter window. If
    that is more than `max_tokens` targets, only as many full windows as fit are used, at least one, evenly spaced.
    """
    targets = len(tokens) - 1
    windows = targets // context  # of full length
    remainder = targets - windows * context
    used = windows
    if windows and max_tokens is not None and targets > max_tokens:
        used, remainder = min(windows, max(1, max_tokens // context)), 0
    for first in range(0, used, batch_size):
        numbers = np.arange(first, min(first + batch_size, used), dtype=np.int64)
        yield _windows(tokens, numbers * windows // used * context, context)
    if remainder:
        yield _windows(tokens, np.array([windows * context]), remainder)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (starts, length)."""
    windows = torch.from_numpy(tokens[starts[:, None].astype(np.int64) + np.arange(length + 1)].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# --- prepared folders -------------------------------------------------------------------------------------------------


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process is preparing `folder`. The OS releases the lock when its process exits."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(folder.name + ".lock")
    _refuse_links(path)
    with open(path, "a") as lock:
        if fcntl:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that is preparing {folder}", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _space_returned(folder: Path, corpus: Corpus) -> Iterator[None]:
    """If the disk is full, delete what was written for `folder`, and name the folder and its size in the OSError."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        shutil.rmtree(_part(folder), ignore_errors=True)
        size = 2 * HEADER_BYTES + MAX_TOKEN_BYTES * sum(corpus.sizes.values())
        explanation = OSError(f"{folder} cannot be written: {error.strerror or error}; it needs at most {size:,} bytes")
        explanation.errno = error.errno
        raise explanation from None


def _part(folder: Path) -> Path:
    return folder.with_name(folder.name + ".part")


def _refuse_links(*paths: Path) -> None:
    """Raise ValueError if preparing text would write through a link, or wait for a pipe."""
    for path in paths:
        with suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ValueError(f"{path} is a link, a pipe or a device; delete it")


def _build(folder: Path, corpus: Corpus, tokenizer_kind: str, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Write to a temporary folder, then rename it, so `folder` is complete as soon as it exists.

    What a process that was killed has left in the temporary folder is used.
    """
    part = _part(folder)
    continued = ", continuing an earlier attempt" if part.exists() else ""
    part.mkdir(exist_ok=True)
    print(f"preparing {folder} from {sum(corpus.sizes.values()) / 1e6:.1f} MB of text{continued}", file=sys.stderr)
    try:
        tokenizer = tokenizer or load_tokenizer(tokenizer_kind, part)
    except ValueError:
        print(f"training a tokenizer with --vocab-size {vocab_size}", file=sys.stderr)
        tokenizer = train_tokenizer(chain.from_iterable(corpus.documents("train")), vocab_size)
        tokenizer.save(part)
    for split in SPLITS:
        try:
            open_tokens(part / f"{split}.bin", corpus, tokenizer)
        except NotPrepared:
            write_tokens(part / f"{split}.bin", corpus, split, tokenizer)
    shutil.rmtree(folder, ignore_errors=True)  # exists only if it was damaged
    part.rename(folder)


def _open_first(folders: Iterable[Path], corpus: Corpus, tokenizer_kind: str, tokenizer: Tokenizer | None) -> Prepared:
    """Open the first of `folders` that is complete and consistent. Raises NotPrepared if none is."""
    for folder in folders:
        with suppress(NotPrepared):
            return _open(folder, corpus, tokenizer_kind, tokenizer)
    raise NotPrepared


def _open(folder: Path, corpus: Corpus, tokenizer_kind: str, tokenizer: Tokenizer | None) -> Prepared:
    """Open a prepared folder. Raises NotPrepared unless it is complete and consistent."""
    try:
        tokenizer = tokenizer or load_tokenizer(tokenizer_kind, folder)
    except ValueError as error:
        raise NotPrepared from error
    train, val = (open_tokens(folder / f"{split}.bin", corpus, tokenizer) for split in SPLITS)
    return Prepared(train, val, tokenizer, corpus.name, corpus.hash, val.text_bytes, val.gzip_bytes)
