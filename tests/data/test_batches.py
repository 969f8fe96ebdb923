"""The windows of a batch, the contents of a prepared folder, and when it is rebuilt."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from data import tokens as token_files
from data import workers
from data.batches import Prepared, evaluation_batches, prepare, training_batch
from data.corpus import SPLITS, open_corpus
from data.tokenizer import ByteTokenizer, train_tokenizer
from data.tokens import HEADER_BYTES, NotPrepared, map_tokens, open_tokens, write_tokens

ROOT = Path(__file__).parents[2]
TEXTS = [f"def f{number}(x):\n    return x + {number}  # é\n" * 3 for number in range(200)]


# --- batches ----------------------------------------------------------------------------------------------------------


def starts_of(seed: int, step: int, rows: range, length: int = 10_000, context: int = 16) -> list[int]:
    """The start of each window: token i is i, so the first token of a row is its start."""
    inputs, _ = training_batch(np.arange(length, dtype=np.uint16), seed, step, rows, context)
    return inputs[:, 0].tolist()


def test_training_windows_are_contiguous_and_targets_are_shifted_by_one():
    tokens = np.random.default_rng(0).integers(0, 60_000, 5000).astype(np.uint16)
    inputs, targets = training_batch(tokens, seed=1, step=2, rows=range(64), context=32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (64, 32)
    windows = {bytes(tokens[start : start + 33]) for start in range(5000 - 32)}
    for row in torch.cat((inputs, targets[:, -1:]), dim=1).numpy().astype(np.uint16):
        assert bytes(row) in windows
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_row_depends_only_on_seed_step_and_row_index():
    starts = starts_of(7, 3, range(64))
    for rows in (range(1), range(5, 6), range(16, 48), range(63, 64)):
        assert starts_of(7, 3, rows) == starts[rows.start : rows.stop]
    torch.manual_seed(0), np.random.seed(0)
    assert starts_of(7, 3, range(64)) == starts


def test_seeds_and_steps_draw_different_windows():
    draws = {tuple(starts_of(seed, step, range(8))) for seed in range(20) for step in range(20)}
    assert len(draws) == 400


def test_windows_of_a_seed_do_not_change_between_versions():
    """Recorded values: runs must be reproducible with later versions of this code and of NumPy."""
    assert starts_of(0, 0, range(4)) == [923, 7346, 6009, 9948]
    assert starts_of(1234, 567, range(4)) == [8728, 4352, 2549, 1522]


def test_window_starts_are_uniform():
    """16 starts, 64,000 draws: chi-square with 15 degrees of freedom exceeds 44.3 with probability 1e-4."""
    counts = np.zeros(16)
    for step in range(10):
        np.add.at(counts, starts_of(0, step, range(6400), length=20, context=4), 1)
    assert ((counts - 4000) ** 2 / 4000).sum() < 44.3


def test_tokens_of_a_single_window():
    inputs, targets = training_batch(np.arange(5, dtype=np.uint16), 0, 0, range(3), 4)
    assert inputs.tolist() == [[0, 1, 2, 3]] * 3 and targets.tolist() == [[1, 2, 3, 4]] * 3


@pytest.mark.parametrize("length", [2, 8, 9, 10, 33, 34, 65, 100])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_evaluation_covers_every_target_once(length, batch_size):
    tokens = np.random.default_rng(0).integers(0, 60_000, length).astype(np.uint16)
    all_targets, all_inputs = [], []
    for inputs, targets in evaluation_batches(tokens, 8, batch_size):
        assert inputs.shape == targets.shape and len(inputs) <= batch_size
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        all_targets += targets.flatten().tolist()
        all_inputs += inputs.flatten().tolist()
    assert all_targets == tokens[1:].tolist()
    assert all_inputs == tokens[:-1].tolist()
    sizes = [tuple(inputs.shape) for inputs, _ in evaluation_batches(tokens, 8, batch_size)]
    assert all(size == (batch_size, 8) for size in sizes[:-2])


@pytest.mark.parametrize(
    "max_tokens, expected",
    [(None, 99), (1000, 99), (99, 99), (98, 96), (96, 96), (95, 88), (50, 48), (8, 8), (7, 8), (1, 8)],
)
def test_evaluation_of_at_most_max_tokens(max_tokens, expected):
    """Only full windows are used, at least one, evenly spaced. 99 targets are twelve windows of 8 and three tokens."""
    tokens = np.random.default_rng(0).integers(0, 60_000, 100).astype(np.uint16)
    all_targets: list[int] = []
    for inputs, targets in evaluation_batches(tokens, 8, 3, max_tokens):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert expected == 99 or inputs.shape[1] == 8
        all_targets += targets.flatten().tolist()
    starts = [int(12 * i / (expected / 8)) * 8 for i in range(expected // 8)]
    spaced = [token for start in starts for token in tokens[start + 1 : start + 9].tolist()]
    assert all_targets == (tokens[1:].tolist() if expected == 99 else spaced)
    assert len(list(evaluation_batches(tokens[:4], 8, 3, max_tokens=2))) == 1, "shorter than a window"


@pytest.mark.parametrize("count", [3 * 2**30, 2**32 + 100_000])
@pytest.mark.parametrize("wide", [False, True])
def test_windows_past_two_billion_tokens(tmp_path, count, wide):
    """A sparse token file, of which only the windows that will be read are written. Starts are computed in Python."""
    context, path, size = 16, tmp_path / "train.bin", 4 if wide else 2
    rng = np.random.default_rng(count)
    content: dict[int, list[int]] = {}

    def write(start: int, length: int) -> None:
        content[start] = rng.integers(1, 60_000, length).tolist()
        file.seek(HEADER_BYTES + size * start)
        file.write(np.array(content[start], f"<u{size}").tobytes())

    draws = [int(np.random.Philox(key=np.array([3, step], np.uint64)).random_raw(1)[0]) for step in range(40)]
    starts = [draw % (count - context) for draw in draws]
    with open(path, "wb") as file:
        file.truncate(HEADER_BYTES + size * count)
        for start in starts:
            write(start, context + 1)
        targets = count - 1
        evaluated = [number * (targets // context) // 6 * context for number in range(6)]
        for start in evaluated:
            write(start, context + 1)
    tokens = map_tokens(path, f"<u{size}", count)
    assert max(starts) > 0.9 * count and sum(start >= 2**31 for start in starts) > 5
    for step, start in enumerate(starts):
        inputs, shifted = training_batch(tokens, seed=3, step=step, rows=range(1), context=context)
        assert [*inputs[0].tolist(), int(shifted[0, -1])] == content[start], step
    batches = evaluation_batches(tokens, context, 4, max_tokens=6 * context)
    rows = [row for batch in batches for row in zip(*batch, strict=True)]
    assert [[*inputs.tolist(), int(targets[-1])] for inputs, targets in rows] == [content[start] for start in evaluated]


def test_an_evaluation_of_some_windows_does_not_list_them_all(tmp_path):
    """2**31 windows would take 16 GiB."""
    with open(tmp_path / "tokens", "wb") as file:
        file.truncate(2**33)
    tokens = np.memmap(tmp_path / "tokens", "<u2", mode="r")
    tracemalloc.start()
    assert sum(inputs.numel() for inputs, _ in evaluation_batches(tokens, 2, 8, max_tokens=64)) == 64
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


# --- prepared folders -------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def prepare_from(source: Path, kind: str = "sentencepiece", vocab_size: int = 350, context: int = 16) -> Prepared:
    return prepare([str(source)], kind, vocab_size, source.parent / "cache", context)


def folder_of(source: Path) -> Path:
    (folder,) = (path for path in (source.parent / "cache").iterdir() if path.is_dir())
    return folder


def file_identity(source: Path) -> tuple[int, int]:
    """Changes when the folder is rebuilt."""
    stat = (folder_of(source) / "val.bin").stat()
    return stat.st_ino, stat.st_mtime_ns


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_token_files_contain_each_document_and_an_end_token(source, kind):
    prepared = prepare_from(source, kind)
    corpus, tokenizer = open_corpus([str(source)], source.parent), prepared.tokenizer
    assert (tokenizer.kind, tokenizer.vocab_size) == (kind, {"sentencepiece": 350, "bytes": 257}[kind])
    for split, file in zip(SPLITS, (prepared.train, prepared.val), strict=True):
        texts = ["".join(document) for document in corpus.documents(split)]
        assert file.tokens.dtype == np.uint16 and isinstance(file.tokens, np.memmap)
        ends = np.flatnonzero(file.tokens == tokenizer.end_of_document)
        pieces = np.split(file.tokens, ends + 1)
        assert [tokenizer.decode(piece.tolist()) for piece in pieces] == [*texts, ""]
        assert file.text_bytes == len("".join(texts).encode())
    assert prepared.val_bytes == prepared.val.text_bytes
    assert prepared.val_gzip_bytes == len(gzip.compress("".join(texts).encode(), 9))
    assert (prepared.corpus_name, prepared.corpus_hash) == ("code", corpus.hash)


def test_the_tokenizer_never_sees_validation_text(source):
    corpus = open_corpus([str(source)], source.parent)
    texts = ["".join(document) for document in corpus.documents("train")]
    assert prepare_from(source).tokenizer.hash == train_tokenizer(texts, 350).hash


def test_large_vocabularies_use_uint32(source, tmp_path):
    class Wide(ByteTokenizer):
        vocab_size = 70_000

        def encode_array(self, text, dtype):
            return np.array([69_000 + byte for byte in text.encode()], dtype)

    corpus = open_corpus([str(source)], tmp_path)
    write_tokens(tmp_path / "val.bin", corpus, "val", Wide())
    tokens = open_tokens(tmp_path / "val.bin", corpus, Wide()).tokens
    assert tokens.dtype == np.uint32 and tokens.max() > 69_000


def test_a_prepared_corpus_is_reused(source, capfd):
    first = prepare_from(source)
    assert f"preparing {folder_of(source)}" in capfd.readouterr().err
    stamp = file_identity(source)
    second = prepare_from(source)
    assert file_identity(source) == stamp
    assert capfd.readouterr() == ("", "")
    assert np.array_equal(first.val.tokens, second.val.tokens)
    assert first.tokenizer.hash == second.tokenizer.hash
    assert (first.val_bytes, first.val_gzip_bytes) == (second.val_bytes, second.val_gzip_bytes)
    prepare_from(source, context=32)
    assert file_identity(source) == stamp, "token files do not depend on the context"


def test_different_text_or_vocabulary_gets_its_own_folder(source):
    hashes = {prepare_from(source).tokenizer.hash, prepare_from(source, vocab_size=351).tokenizer.hash}
    source.write_text(source.read_text().replace("return", "yield"))
    changed = prepare_from(source)
    assert len({changed.tokenizer.hash, *hashes}) == 3
    assert "yield" in changed.tokenizer.decode(changed.val.tokens.tolist())
    assert sum(path.is_dir() for path in (source.parent / "cache").iterdir()) == 3


def test_a_given_tokenizer_is_used_as_it_is(source, capfd):
    """It is not trained, its tokens are reused, and another tokenizer of the same kind and size gets its own folder."""
    names, cache = [str(source)], source.parent / "cache"
    given, other = (train_tokenizer(TEXTS[:count], 350) for count in (50, 100))
    first = prepare(names, "bytes", 0, cache, 16, tokenizer=given)
    message = capfd.readouterr().err
    assert "preparing" in message and "training a tokenizer" not in message
    assert first.tokenizer is given
    assert np.array_equal(prepare(names, "bytes", 0, cache, 16, tokenizer=given).val.tokens, first.val.tokens)
    assert capfd.readouterr() == ("", "")
    second = prepare(names, "bytes", 0, cache, 16, tokenizer=other)
    assert given.hash != other.hash and second.tokenizer is other
    for prepared in (first, second, prepare_from(source)):
        assert prepared.val_bytes == len(prepared.tokenizer.decode_bytes(prepared.val.tokens))
    assert sum(path.is_dir() for path in cache.iterdir()) == 3


def damage_magic(folder: Path) -> None:
    content = (folder / "val.bin").read_bytes()
    (folder / "val.bin").write_bytes(b"X" + content[1:])


def truncate_tokens(folder: Path) -> None:
    os.truncate(folder / "train.bin", (folder / "train.bin").stat().st_size - 2)


def truncate_header(folder: Path) -> None:
    os.truncate(folder / "val.bin", 40)


def append_bytes(folder: Path) -> None:
    with open(folder / "val.bin", "ab") as file:
        file.write(b"\0\0")


def zero_header(folder: Path) -> None:
    with open(folder / "val.bin", "r+b") as file:
        file.write(bytes(HEADER_BYTES))


def remove_tokens(folder: Path) -> None:
    (folder / "train.bin").unlink()


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.model").unlink()


def replace_tokenizer(folder: Path) -> None:
    train_tokenizer(TEXTS[:50], 350).save(folder)


def change_corpus_hash(folder: Path) -> None:
    content = (folder / "val.bin").read_bytes()
    start = content.index(b'"corpus": "') + len(b'"corpus": "')
    (folder / "val.bin").write_bytes(content[:start] + b"x" + content[start + 1 :])


@pytest.mark.parametrize(
    "damage",
    [
        damage_magic,
        truncate_tokens,
        truncate_header,
        append_bytes,
        zero_header,
        remove_tokens,
        remove_tokenizer,
        replace_tokenizer,
        change_corpus_hash,
    ],
)
def test_a_damaged_folder_is_rebuilt(source, damage):
    prepare_from(source)
    folder = folder_of(source)
    expected = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    prepare_from(source)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


PREPARE = "import sys; from pathlib import Path; from data.batches import prepare; prepare([sys.argv[1]], 'bytes', 0, Path(sys.argv[2]), 16)"  # noqa: E501


def start_preparing(source: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", PREPARE, str(source), str(source.parent / "cache")]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_a_killed_preparation_leaves_no_folder_that_looks_complete(tmp_path):
    source = tmp_path / "long.txt"
    source.write_text("".join(f"line {number}\n" for number in range(1_500_000)))
    process = start_preparing(source)
    while not list(tmp_path.glob("cache/*.part/train.bin")):
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (part,) = tmp_path.glob("cache/*.part")
    assert not part.with_suffix("").exists()
    prepared = prepare([str(source)], "bytes", 0, tmp_path / "cache", 16)
    assert len(prepared.train.tokens) + len(prepared.val.tokens) == source.stat().st_size + 2
    assert not part.exists()


def stopped_after(chunks: int):
    """A byte tokenizer that is interrupted after it has encoded so many chunks."""

    class Stopped(ByteTokenizer):
        encoded = 0

        def encode_array(self, text, dtype):
            if self.encoded == chunks:
                raise KeyboardInterrupt
            self.encoded += 1
            return super().encode_array(text, dtype)

    return Stopped()


@pytest.mark.parametrize("split", SPLITS)
def test_a_token_file_is_continued_where_it_was_stopped(source, tmp_path, monkeypatch, split):
    monkeypatch.setattr(workers, "JOB_BYTES", 100)
    monkeypatch.setattr(token_files, "SAVE_BYTES", 300)  # some ids are written, but not counted in the header
    corpus, path = open_corpus([str(source)], tmp_path), tmp_path / "tokens.bin"
    write_tokens(path, corpus, split, ByteTokenizer())
    expected, chunks = path.read_bytes(), len(list(corpus.documents(split)))
    path.unlink()
    encoded, attempts = 0, 0
    while not path.exists() or path.read_bytes() != expected:
        attempts += 1
        assert attempts < 40, "the attempts lead nowhere"
        tokenizer = stopped_after(9)
        with suppress(KeyboardInterrupt):
            write_tokens(path, corpus, split, tokenizer)
        encoded += tokenizer.encoded
        with suppress(NotPrepared):
            assert open_tokens(path, corpus, tokenizer) and path.read_bytes() == expected
    assert attempts > 2
    assert chunks <= encoded < chunks + attempts, "each attempt encodes at most one document again"


def test_a_header_is_written_after_its_ids_are_on_the_disk(source, tmp_path, monkeypatch):
    """After a power failure, a header must not promise ids that were never written."""
    path, flushed, fsync = tmp_path / "tokens.bin", list[tuple[int, bytes]](), os.fsync

    def record(descriptor):
        fsync(descriptor)
        flushed.append((path.stat().st_size, path.read_bytes()[:HEADER_BYTES]))

    monkeypatch.setattr(os, "fsync", record)
    write_tokens(path, open_corpus([str(source)], tmp_path), "val", ByteTokenizer())
    assert flushed == [(path.stat().st_size, bytes(HEADER_BYTES))]


@pytest.mark.parametrize("change", ["size", "name", "tokenizer", "corpus", "jobs"])
def test_an_unfinished_file_that_does_not_fit_is_started_again(source, tmp_path, monkeypatch, change):
    for module in (workers, token_files):
        monkeypatch.setattr(module, "JOB_BYTES", 500)
    monkeypatch.setattr(token_files, "SAVE_BYTES", 2000)
    corpus, path, counting = open_corpus([str(source)], tmp_path), tmp_path / "tokens.bin", stopped_after(10**9)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(path, corpus, "train", stopped_after(100))
    content = path.read_bytes()
    assert content.startswith(b"normal-llama unfinished tokens\n{")
    if change == "size":
        path.write_bytes(content[:3000])
    elif change == "name":
        path.write_bytes(content.replace(b"unfinished", b"unknown"))
    elif change == "tokenizer":
        counting.hash = "another"
    elif change == "corpus":
        source.write_text(source.read_text() + json.dumps({"text": "one more"}) + "\n")
        corpus = open_corpus([str(source)], tmp_path)
    else:
        for module in (workers, token_files):
            monkeypatch.setattr(module, "JOB_BYTES", 300)
    write_tokens(path, corpus, "train", counting)
    assert counting.encoded == len(list(corpus.documents("train")))
    write_tokens(tmp_path / "fresh.bin", corpus, "train", counting)
    assert path.read_bytes() == (tmp_path / "fresh.bin").read_bytes()


def test_finished_parts_of_an_earlier_attempt_are_used(source, capfd):
    prepare_from(source)
    folder = folder_of(source)
    expected = {path.name: path.read_bytes() for path in folder.iterdir()}
    part = folder.rename(folder.with_name(folder.name + ".part"))
    truncate_header(part)
    kept = {name: (part / name).stat() for name in ("train.bin", "tokenizer.model")}
    capfd.readouterr()
    prepare_from(source)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
    for name, stat in kept.items():
        now = (folder / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns), name
    message = capfd.readouterr().err
    assert "continuing an earlier attempt" in message and "training a tokenizer" not in message


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_split_shorter_than_one_window_is_refused(source, kind):
    length = len(prepare_from(source, kind).val.tokens)
    assert prepare_from(source, kind, context=length - 1)
    with pytest.raises(ValueError, match=rf"^--data {source}: the validation text .* --context {length} needs .*"):
        prepare_from(source, kind, context=length)


def test_a_text_that_is_too_short_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "short.txt").write_text("short " * 200)
    with pytest.raises(ValueError, match="the validation text has at most 121 tokens, but --context 256 needs 257"):
        prepare([str(tmp_path / "short.txt")], "sentencepiece", 2048, tmp_path / "cache", 256)
    assert not (tmp_path / "cache").exists()


def test_an_impossible_vocabulary_size_leaves_no_folder(source):
    with pytest.raises(ValueError, match=r"^--vocab-size 60000 is too large for this text; use at most \d+$"):
        prepare_from(source, vocab_size=60_000)
    assert not [path for path in (source.parent / "cache").iterdir() if not path.name.endswith((".part", ".lock"))]


MEASURE = """
import resource, sys
from pathlib import Path
from data.batches import prepare
prepared = prepare([sys.argv[1]], "sentencepiece", 2048, Path(sys.argv[2]), 256)
print(prepared.train.text_bytes + prepared.val_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB only on Linux")
@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_preparing_a_gigabyte_of_text_needs_less_than_800_mib(tmp_path, name):
    """Peak memory of the whole process, of which importing PyTorch is about 220 MiB."""
    pages = ["".join(document) for document in open_corpus(["python"], tmp_path).documents("train")]
    size = 0
    with open(tmp_path / name, "w") as file:
        while size < 1e9:
            for page in pages:
                text = f"# {size}\n{page}"
                size += file.write(json.dumps({"text": text}) + "\n" if name.endswith("jsonl") else text)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / name), str(tmp_path / "cache")]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    text_bytes, peak_kib = map(int, output.split())
    assert text_bytes > 0.9e9
    assert peak_kib < 800 * 1024
