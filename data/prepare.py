"""Prepares a corpus once: a folder with one token file per split, and the tokenizer if it is trained here."""

import hashlib
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.batches import SPLITS, map_tokens
from data.corpus import Corpus, progress_bar
from data.pretrained import read_directory
from data.tokenizer import TOKENIZER_KINDS, Ids, SentencePieceTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from files import describe_write_error, lock_file, read_cached, read_ours, require, sha256, sync, warn, write_ours

FORMAT_VERSION = 7  # Increase it whenever the same text would give different tokens.
RECORD, PROGRESS = "record.json", "progress.json"
# Characters. A document of up to WHOLE is encoded as one text, a longer one in windows that overlap.
WHOLE, WINDOW, OVERLAP = 1 << 24, 1 << 18, 1 << 13
BATCH_CHARS = 1 << 20  # encoded at a time, by the tokenizer's library on all CPUs; at least two windows
SAVE_EVERY = 16  # batches; a preparation that was stopped repeats at most so many
NO_STARTS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Prepared:
    """A tokenized corpus.

    train, val: the ids of each document and the end-of-document id; memory-mapped, uint16 if they fit, else uint32.
    val_gzip_bpb: bits per byte of the validation text after `gzip -9`; None for token files of others.
    lost: the share of the bytes of the text that do not come back from its ids.
    """

    train: np.ndarray
    val: np.ndarray
    val_gzip_bpb: float | None
    tokenizer: Tokenizer
    corpus_name: str
    corpus_hash: str
    lost: float = 0.0


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

    `val_names` and `column` are those of `Corpus`. A `tokenizer` is used as it is. Otherwise its `kind` says which: one
    of `vocab_size` ids is trained, or there are bytes, a directory that holds one, or none.
    """
    if tokenizer is None and kind not in TOKENIZER_KINDS:
        tokenizer = read_directory(Path(kind))
    elif tokenizer is None and kind != SentencePieceTokenizer.kind:
        tokenizer = load_tokenizer(kind, Path(), vocab_size)
    corpus = Corpus(names, cache_dir, val_names, column)
    _check_lengths(corpus, corpus.sizes, context)  # early: the size of text in bytes is an upper bound on the tokens
    if corpus.tokens:
        if not tokenizer:
            raise ValueError("token files need --tokenizer DIR or bytes, or --vocab-size without --tokenizer")
        train, val = corpus.tokens
        return Prepared(train, val, None, tokenizer, corpus.name, corpus.hash)
    if tokenizer:
        tokenizer.encode("")  # an error if it only stands for token files
        kind, vocab_size = tokenizer.kind, tokenizer.vocab_size
    made_from = (FORMAT_VERSION, corpus.hash, kind, vocab_size, tokenizer and tokenizer.hash)
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()
    folder = cache_dir / f"{corpus.name}-{kind}-{vocab_size}-{key[:12]}"
    prepared = _open(folder, corpus, tokenizer)
    if prepared is None:
        with lock_file(folder.with_name(f"{folder.name}.lock"), wait=True):
            # Another process may have built it while this one waited.
            prepared = _open(folder, corpus, tokenizer) or _build(folder, corpus, vocab_size, tokenizer)
    assert prepared
    if prepared.lost:
        lossy = f"{100 * prepared.lost:.3g}% of the text does not come back from its ids, so val_bpb is of another text"
        warn(f"warning: the tokenizer loses text: {lossy}")
    _check_lengths(corpus, {"train": len(prepared.train), "val": len(prepared.val)}, context)
    return prepared


def _check_lengths(corpus: Corpus, tokens: dict[str, int], context: int) -> None:
    for split, found in tokens.items():
        needed = context + 1 if corpus.names else 2 * (split == "val")  # an evaluation may have shorter windows
        problem = f"the {split} split has at most {found} tokens, and {needed} are needed"
        names = (split == "val" and corpus.val_names) or corpus.names
        require(found >= needed, f"{' '.join(names)}: {problem}; add text or lower --context")


def _build(folder: Path, corpus: Corpus, vocab_size: int, tokenizer: Tokenizer | None) -> Prepared | None:
    """Write to a temporary folder, where a process that was stopped is continued, and rename it when it is complete."""
    print(f"preparing {folder} from {sum(corpus.sizes.values()) / 1e3:,.0f} kB of text", file=sys.stderr)
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(exist_ok=True)
    with suppress(ValueError):
        trained = load_tokenizer("sentencepiece", part)
        if trained.hash == read_ours(part / RECORD, folder.name)["tokenizer"]:
            tokenizer = tokenizer or trained
    try:
        if tokenizer is None:
            print(f"training a tokenizer with --vocab-size {vocab_size}", file=sys.stderr)
            tokenizer = train_tokenizer(corpus.chunks("train"), vocab_size)
            tokenizer.save(part)
            write_ours(part / RECORD, {"tokenizer": tokenizer.hash}, folder.name)
        record = {"tokenizer": tokenizer.hash} | _write_tokens(part, corpus, tokenizer)
    except ValueError:
        shutil.rmtree(part)
        raise
    (part / PROGRESS).unlink(missing_ok=True)
    write_ours(part / RECORD, record, folder.name)
    shutil.rmtree(folder, ignore_errors=True)  # exists only if it was damaged
    part.rename(folder)
    return _open(folder, corpus, tokenizer)


def _open(folder: Path, corpus: Corpus, tokenizer: Tokenizer | None) -> Prepared | None:
    """Open a prepared folder, and the tokenizer in it unless one is given. None unless it is complete and intact."""
    try:
        tokenizer = tokenizer or load_tokenizer("sentencepiece", folder)
        record = read_ours(folder / RECORD, folder.name)
        if record["tokenizer"] != tokenizer.hash:
            return None
        files = [folder / f"{split}.bin" for split in SPLITS]
        stat = [[one.st_size, one.st_mtime_ns] for one in map(Path.stat, files)]
        if record.get("stat") != stat:  # they are hashed once
            hashes = [*map(sha256, files)]
            if record.get("files", hashes) != hashes:
                return None
            with suppress(OSError):  # a cache that was copied, perhaps to where nothing can be written
                write_ours(folder / RECORD, record | {"files": hashes, "stat": stat}, folder.name)
        train, val = (map_tokens(file, _dtype(tokenizer)) for file in files)
        return Prepared(train, val, record["val_gzip_bpb"], tokenizer, corpus.name, corpus.hash, record["lost"])
    except (OSError, ValueError, KeyError):
        return None


# --- encoding --------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A document's text in one split, or a window of it if it is long."""

    split: str
    begins: bool  # at the beginning of the document
    ends: bool  # at the end of the text
    whole: bool
    offset: int  # the byte of the text at which it begins
    text: str


def _write_tokens(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, float]:
    """Write `train.bin` and `val.bin`, and return `val_gzip_bpb`, of at most about 10 MB, and `lost`.

    A document is the ids that begin a prompt (unless only its end is in this split), those of its text, and the
    end-of-document id. The ids do not depend on where an earlier process was stopped.
    """
    dtype, paths = _dtype(tokenizer), {split: folder / f"{split}.bin" for split in SPLITS}
    progress = dict.fromkeys(("done", *SPLITS), 0)  # batches that are done, and the bytes of each file
    found = read_cached(folder / PROGRESS, folder.name)
    if found and all(path.is_file() and path.stat().st_size >= found[split] for split, path in paths.items()):
        progress = found
    for split, path in paths.items():
        with open(path, "ab") as file:
            file.truncate(progress[split])
    counts = np.zeros(256)  # how often the text has each byte
    gzip, size, taken, compressed = zlib.compressobj(9, wbits=31), 0, 0, 0  # bytes of validation text; then of gzip's
    every = corpus.sizes["val"] // 10_000_000 + 1  # gzip takes every so many of its MB
    ids = starts = NO_STARTS
    with progress_bar("encoding", sum(corpus.sizes.values())) as bar:
        for number, batch in enumerate(_batches(corpus), 1):
            for piece in batch:
                data = piece.text[: None if piece.ends else WINDOW].encode()
                counts += np.bincount(np.frombuffer(data, np.uint8), minlength=256)
                counts[ord(" ")] += tokenizer.space_in_front and data != b"" and not piece.offset
                if piece.split == "val":
                    if size // 1_000_000 % every == 0:
                        taken += len(data)
                        compressed += len(gzip.compress(data))
                    size += len(data)
                bar.update(len(data))
            if number >= progress["done"]:  # the last one is encoded again, for the window at its end
                parts, ids, starts = _join(batch, tokenizer, ids, starts)
            if number <= progress["done"]:
                bar.initial = bar.n
                continue
            for split, path in paths.items():
                array = np.concatenate([[], *parts[split]], dtype=dtype, casting="unsafe")
                progress[split] += array.nbytes
                with describe_write_error(path, corpus.sizes[split] * dtype.itemsize), open(path, "ab") as file:
                    file.write(array.data)
                require(path.stat().st_size == progress[split], f"another process writes {path} too; start one alone")
            progress["done"] = number
            if number % SAVE_EVERY == 0:
                for path in paths.values():
                    sync(path)
                write_ours(folder / PROGRESS, progress, folder.name)
    files = [map_tokens(path, dtype) for path in paths.values()]
    if taken < size:
        warn(f"gzip -9 has compressed {taken:,} of {size:,} bytes of validation text, in evenly spaced parts")
    bpb = 8 * (compressed + len(gzip.flush())) / max(taken, 1)
    return {"val_gzip_bpb": bpb, "lost": _lost(counts, files, tokenizer)}


def _lost(text: np.ndarray, files: list[np.ndarray], tokenizer: Tokenizer) -> float:
    """The share of a text that is not in its token files, by how often the `text` has each byte."""
    parts = [part for ids in files for part in np.array_split(ids, len(ids) // 1_000_000 + 1)]
    used = sum(np.bincount(part, minlength=len(tokenizer.pieces)) for part in parts)
    pieces = np.frombuffer(b"".join(tokenizer.pieces), np.uint8)
    back = np.bincount(pieces, np.repeat(used, [*map(len, tokenizer.pieces)]), 256)
    return 1 - float(np.minimum(text, back).sum() / max(text.sum(), back.sum()))


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _batches(corpus: Corpus) -> Iterator[list[Piece]]:
    batch, chars = list[Piece](), 0
    for piece in _pieces(corpus):
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    yield batch


def _pieces(corpus: Corpus) -> Iterator[Piece]:
    """The corpus in order."""
    for split, begins, chunks in corpus.parts():
        offset, text = 0, ""
        for chunk in chunks:
            text += chunk  # in place
            start = 0
            while len(text) - start > (WINDOW + OVERLAP if offset else WHOLE):
                window = text[start : start + WINDOW + OVERLAP]
                yield Piece(split, begins and not offset, False, False, offset, window)
                offset += len(text[start : start + WINDOW].encode())
                start += WINDOW
            text = text[start:]
        yield Piece(split, begins and not offset, True, not offset, offset, text)


def _join(
    batch: list[Piece], tokenizer: Tokenizer, ids: np.ndarray, starts: np.ndarray
) -> tuple[dict[str, list[Ids]], np.ndarray, np.ndarray]:
    """The ids that come next in each split; then the `ids` of the last window, and the byte where each begins.

    One window gives way to the next where both begin a token. That is in the middle of their overlap, far from both
    ends, where a text that goes on may have other tokens. In text that repeats itself there may be no such place: what
    is between a token of one and the next token of the other is encoded alone.
    """
    parts: dict[str, list[Ids]] = {split: [] for split in SPLITS}
    texts = iter(tokenizer.encode_batch([piece.text for piece in batch if piece.whole]))
    windows = iter(tokenizer.encode_with_starts([piece.text for piece in batch if not piece.whole]))
    for piece in batch:
        new, new_starts = (np.asarray(next(texts)), NO_STARTS) if piece.whole else next(windows)
        part, first = parts[piece.split], 0
        if piece.begins:
            part.append(tokenizer.prompt_start)
        if piece.offset:
            new_starts = new_starts + piece.offset
            overlap = starts[starts >= piece.offset]
            # Only the overlap is compared: to sort all starts would take eight times as long as all the rest.
            common = np.intersect1d(overlap, new_starts[new_starts <= starts.max(initial=0)])
            end = common[len(common) // 2] if len(common) else np.append(overlap, piece.offset)[0]
            first = np.searchsorted(new_starts, end)
            data = piece.text.encode()
            start = np.append(new_starts, piece.offset + len(data))[first]
            between = data[end - piece.offset : start - piece.offset].decode(errors="ignore")
            part += [ids[: np.searchsorted(starts, end)], tokenizer.encode(between)]
        ids, starts = new[first:], new_starts[first:]
        if piece.ends:
            part += [ids, [tokenizer.end_of_document]]
    return parts, ids, starts
