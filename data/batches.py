"""From a corpus to batches: a file of tokens per split, prepared once, and the windows a model is trained on.

data = prepare(["python"], "sentencepiece", 2048, Path(".cache"), context=256)
inputs, targets = training_batch(data.train.tokens, seed=0, step=0, rows=range(32), context=256)
"""

import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.corpus import SPLITS, Corpus, Split, open_corpus
from data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from data.tokens import NotPrepared, TokenFile, open_tokens, write_tokens

try:
    import fcntl
except ImportError:  # Windows has no such lock, so there nobody checks
    fcntl = None  # type: ignore[assignment]

VERSION = 3  # of what is in a prepared folder; one more whenever the same text would give other tokens


@dataclass(frozen=True)
class Prepared:
    """A corpus as tokens.

    val_bytes: length of the validation text in UTF-8, which bits per byte divide by.
    val_gzip_bytes: what `gzip -9` makes of the validation text.
    """

    train: TokenFile
    val: TokenFile
    tokenizer: Tokenizer
    corpus_name: str
    corpus_hash: str
    val_bytes: int
    val_gzip_bytes: int


def prepare(names: list[str], tokenizer_kind: str, vocab_size: int, cache_dir: Path, context: int) -> Prepared:
    """Make the corpus behind `names` into tokens, unless an earlier run left the same in `cache_dir`.

    The byte tokenizer has 257 ids, whatever `vocab_size` says. Raises ValueError for a corpus or a vocabulary that
    cannot be, and where a split is shorter than one window of `context` + 1 tokens.
    """
    vocab_size = ByteTokenizer.vocab_size if tokenizer_kind == ByteTokenizer.kind else vocab_size
    corpus = open_corpus(names, cache_dir)
    for split in SPLITS:  # no tokenizer makes more tokens than these
        _check_length(split, names, corpus.sizes[split], context)
    key = hashlib.sha256(repr((VERSION, corpus.hash, tokenizer_kind, vocab_size)).encode()).hexdigest()
    folder = cache_dir / f"{corpus.name}-{tokenizer_kind}-{vocab_size}-{key[:12]}"
    try:
        prepared = _open(folder, corpus, tokenizer_kind)
    except NotPrepared:
        with _alone(folder):
            try:
                prepared = _open(folder, corpus, tokenizer_kind)  # another process has just made it
            except NotPrepared:
                _build(folder, corpus, tokenizer_kind, vocab_size)
                prepared = _open(folder, corpus, tokenizer_kind)
    for split in SPLITS:
        _check_length(split, names, len(getattr(prepared, split).tokens), context)
    return prepared


def _check_length(split: Split, names: list[str], tokens: int, context: int) -> None:
    if tokens < context + 1:
        part = {"train": "training", "val": "validation"}[split]
        raise ValueError(
            f"--data {' '.join(names)}: its {part} text is {tokens} tokens at most, and --context {context} "
            f"takes {context + 1}; give more text or a shorter context"
        )


# --- batches ----------------------------------------------------------------------------------------------------------


def training_batch(tokens: np.ndarray, seed: int, step: int, rows: range, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (rows, context): the given rows of the global batch of a step.

    Each row is a window drawn from all of `tokens`, each start as likely as the next, and depends on seed, step and
    its number alone: not on which other rows are asked for.
    """
    draws = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(rows.stop)[rows.start : rows.stop]
    starts = draws % np.uint64(len(tokens) - context)
    windows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1, dtype=np.uint64)].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def evaluation_batches(
    tokens: np.ndarray, context: int, batch_size: int, most_tokens: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, int64 (up to batch_size, context), from windows side by side.

    Every token but the first is a target once; what is left over at the end is a last batch of one shorter window.
    Where that is more than `most_tokens` targets there are only the first windows, as many as fit into it, or one.
    """
    if most_tokens is not None and len(tokens) - 1 > most_tokens:
        tokens = tokens[: max(1, most_tokens // context) * context + 1]
    whole = (len(tokens) - 1) // context * context
    for start in range(0, whole, batch_size * context):
        stop = min(start + batch_size * context, whole)
        yield _as_rows(tokens[start : stop + 1], context)
    if whole < len(tokens) - 1:
        yield _as_rows(tokens[whole:], len(tokens) - 1 - whole)


def _as_rows(tokens: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    flat = torch.from_numpy(tokens.astype(np.int64))
    return flat[:-1].view(-1, context), flat[1:].view(-1, context)


# --- the folder of a prepared corpus ----------------------------------------------------------------------------------


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process prepares `folder`. The lock goes with its process, however that ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path, corpus: Corpus, tokenizer_kind: str, vocab_size: int) -> None:
    """Write everything beside, then rename: from the moment `folder` is there it is whole."""
    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that was killed
    beside.mkdir()
    print(f"preparing {folder} from {sum(corpus.sizes.values()) / 1e6:.1f} MB of text", file=sys.stderr)
    if tokenizer_kind == ByteTokenizer.kind:
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        print(f"training a tokenizer of {vocab_size} pieces", file=sys.stderr)
        tokenizer = train_tokenizer(chain.from_iterable(corpus.documents("train")), vocab_size)
    tokenizer.save(beside)
    for split in SPLITS:
        write_tokens(beside / f"{split}.bin", corpus, split, tokenizer)
    shutil.rmtree(folder, ignore_errors=True)  # damaged, or nothing would have to be built
    beside.rename(folder)


def _open(folder: Path, corpus: Corpus, tokenizer_kind: str) -> Prepared:
    """What an earlier preparation left. Raises NotPrepared unless it is all there and fits together."""
    try:
        tokenizer = load_tokenizer(tokenizer_kind, folder)
    except ValueError as error:
        raise NotPrepared from error
    train, val = (open_tokens(folder / f"{split}.bin", corpus, tokenizer) for split in SPLITS)
    return Prepared(train, val, tokenizer, corpus.name, corpus.hash, val.text_bytes, val.gzip_bytes)
