"""Prepares a corpus once: a folder with a tokenizer and one token file per split.

data = prepare(["python"], "sentencepiece", 2048, Path(".cache"), context=256)
inputs, targets = training_batch(data.train, seed=0, step=0, rows=range(32), context=256)
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.corpus import Corpus
from data.encoding import PROGRESS, token_dtype, write_tokens
from data.token_files import SPLITS, map_tokens
from data.tokenizer import KINDS, SentencePieceTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from files import lock_file, read_json, require, sha256, write_atomically

FORMAT_VERSION = 7  # Increase it whenever the same text would give different tokens.
RECORD = "record.json"


@dataclass(frozen=True)
class Prepared:
    """A tokenized corpus.

    train, val: the ids of each document and the end-of-document id; memory-mapped, uint16 if they fit, else uint32.
    val_gzip_bpb: bits per byte of the validation text after `gzip -9`; None for token files of others.
    """

    train: np.ndarray
    val: np.ndarray
    val_gzip_bpb: float | None
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
    verify: bool = False,
) -> Prepared:
    """Tokenize the corpus behind `names`, or reuse the token files that an earlier run left in `cache_dir`.

    `val_names` and `column` are those of `Corpus`. A `tokenizer` is used as it is. Otherwise its `kind` says which: one
    of `vocab_size` ids is trained, or there are bytes, a directory that holds one, or none. Raises ValueError for an
    invalid corpus or vocabulary size and for a split shorter than one window of `context` + 1 tokens, and OSError,
    naming the file and its size, if the disk is full. Text and token files whose sizes and times are those of an
    earlier run are not read again unless `verify` is true.
    """
    tokenizer = tokenizer or given_tokenizer(kind, vocab_size)
    corpus = Corpus(names, cache_dir, val_names, column, verify)
    if tokenizer and not corpus.tokens:
        tokenizer.encode("")  # an error if it only stands for token files
    _check_lengths(corpus, corpus.sizes, context)  # early: the size of text in bytes is an upper bound on the tokens
    if corpus.tokens and tokenizer:
        train, val = corpus.tokens
        return Prepared(train, val, None, tokenizer, corpus.name, corpus.hash)
    require(not corpus.tokens, "token files need --tokenizer DIR or bytes, or --vocab-size without --tokenizer")
    if tokenizer:
        kind, vocab_size = tokenizer.kind, tokenizer.vocab_size
    made_from = (FORMAT_VERSION, corpus.hash, kind, vocab_size, tokenizer and tokenizer.hash)
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()
    folder = cache_dir / f"{corpus.name}-{kind}-{vocab_size}-{key[:12]}"
    prepared = _open(folder, corpus, tokenizer, verify)
    if prepared is None:
        with lock_file(folder.with_name(f"{folder.name}.lock"), wait=True):
            # Another process may have built it while this one waited.
            prepared = _open(folder, corpus, tokenizer) or _build(folder, corpus, vocab_size, tokenizer)
    _check_lengths(corpus, {"train": len(prepared.train), "val": len(prepared.val)}, context)
    return prepared


def given_tokenizer(kind: str, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of this kind, or in this directory. None for sentencepiece, which is trained on the text."""
    if kind == SentencePieceTokenizer.kind:
        return None
    if kind in KINDS:
        return load_tokenizer(kind, Path(), vocab_size)
    from data.pretrained import read_directory  # imported here because few runs need it

    tokenizer = read_directory(Path(kind))
    needed = tokenizer.text_vocab_size
    require(needed <= vocab_size, f"--vocab-size {vocab_size} is too small: --tokenizer {kind} has {needed} ids")
    return tokenizer


def _check_lengths(corpus: Corpus, tokens: dict[str, int], context: int) -> None:
    if not corpus.names:  # text to evaluate on; shorter windows are enough
        require(tokens["val"] > 1, f"--data {' '.join(corpus.val_names)}: an evaluation needs at least 2 tokens")
        return
    for split, text in zip(SPLITS, ("training", "validation"), strict=True):
        own = split == "val" and corpus.val_names
        source = " ".join(["--val-data", *corpus.val_names] if own else ["--data", *corpus.names])
        advice = f"--context {context} needs {context + 1}; add text or lower --context"
        problem = f"{source}: the {text} text has at most {tokens[split]} tokens, but {advice}"
        require(tokens[split] > context, problem)


def _build(folder: Path, corpus: Corpus, vocab_size: int, tokenizer: Tokenizer | None) -> Prepared:
    """Write to a temporary folder, then rename it, so `folder` is complete as soon as it exists.

    What a process that was stopped has finished is in that folder too, and is not done again.
    """
    print(f"preparing {folder} from {sum(corpus.sizes.values()) / 1e3:,.0f} kB of text", file=sys.stderr)
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(exist_ok=True)
    with suppress(ValueError):
        tokenizer = tokenizer or load_tokenizer("sentencepiece", part)
    try:
        if tokenizer is None:
            print(f"training a tokenizer with --vocab-size {vocab_size}", file=sys.stderr)
            tokenizer = train_tokenizer(corpus.chunks("train"), vocab_size)
            tokenizer.save(part)
        val_gzip_bpb = write_tokens(part, corpus, tokenizer)
    except ValueError:
        shutil.rmtree(part)
        raise
    (part / PROGRESS).unlink(missing_ok=True)
    write_atomically(part / RECORD, json.dumps({"tokenizer": tokenizer.hash, "val_gzip_bpb": val_gzip_bpb}))
    shutil.rmtree(folder, ignore_errors=True)  # exists only if it was damaged
    part.rename(folder)
    prepared = _open(folder, corpus, tokenizer)
    assert prepared
    return prepared


def _open(folder: Path, corpus: Corpus, tokenizer: Tokenizer | None, verify: bool = False) -> Prepared | None:
    """Open a prepared folder, and the tokenizer in it unless one is given. None unless it is complete and intact.

    Token files are hashed if `verify`, and if they have another size or modification time than when they were hashed.
    """
    try:
        tokenizer = tokenizer or load_tokenizer("sentencepiece", folder)
        record = read_json(folder / RECORD, dict)
        if record["tokenizer"] != tokenizer.hash:
            return None
        files = {split: folder / f"{split}.bin" for split in SPLITS}
        stat = [[one.st_size, one.st_mtime_ns] for one in map(Path.stat, files.values())]
        if verify or record.get("stat") != stat:
            hashes = {split: sha256(file) for split, file in files.items()}
            if record.get("sha256", hashes) != hashes:
                return None
            with suppress(OSError):  # a cache that was copied, perhaps to where nothing can be written
                write_atomically(folder / RECORD, json.dumps(record | {"sha256": hashes, "stat": stat}))
        train, val = (map_tokens(file, token_dtype(tokenizer)) for file in files.values())
        return Prepared(train, val, record["val_gzip_bpb"], tokenizer, corpus.name, corpus.hash)
    except (OSError, ValueError, KeyError):
        return None
