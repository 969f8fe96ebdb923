"""What a prepared folder holds, when it is used again, and when it is rebuilt."""

import gzip
import json
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import files
from data import corpus as splitting
from data import prepare as preparing
from data.corpus import SPLITS, Corpus
from data.prepare import Prepared, prepare
from data.sources import read_documents
from data.tokenizer import ByteTokenizer, train_tokenizer
from files import read_ours, sha256, write_ours

TEXTS = [f"def f{number}(x):\n    return x + {number}  # é \u2581 <s>\n" * 3 for number in range(200)]
LONG = "".join(sorted(TEXTS)) + "no line end, 日本語 " * 90_000 + "\n\n\nx" * 90_000 + "the end"  # 2.5 MB, in chunks


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def prepare_from(source: Path, kind: str = "sentencepiece", vocab_size: int = 350) -> Prepared:
    return prepare([str(source)], kind, vocab_size, source.parent / "cache", 16)


def folders(source: Path) -> list[Path]:
    return [path for path in (source.parent / "cache").iterdir() if path.is_dir()]


def content(folder: Path) -> dict[str, bytes]:
    """Its files, without the times in its record."""
    assert not (folder / preparing.PROGRESS).exists()
    record = read_ours(folder / "record.json", folder.name) | {"stat": None}
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {"record.json": repr(record).encode()}


@pytest.mark.parametrize(("kind", "batch"), [("sentencepiece", 1), ("sentencepiece", 1 << 20), ("bytes", 1000)])
@pytest.mark.parametrize("name", ["code.jsonl", "code.txt"])
def test_token_files_contain_each_document_and_an_end_token(source, monkeypatch, kind, batch, name):
    """However much is encoded at a time, with line ends or not, without marks of the chunks in which text is read."""
    monkeypatch.setattr(preparing, "BATCH_CHARS", batch)
    source = source.with_name(name)
    source.with_suffix(".txt").write_text(LONG, newline="")
    prepared = prepare_from(source, kind)
    corpus, tokenizer = Corpus([str(source)], source.parent), prepared.tokenizer
    expected = ByteTokenizer() if kind == "bytes" else train_tokenizer(corpus.chunks("train"), 350)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.hash) == (kind, expected.vocab_size, expected.hash)
    for split, tokens in zip(SPLITS, (prepared.train, prepared.val), strict=True):
        texts = ["".join(chunks) for part, _, chunks in corpus.parts() if part == split]
        assert tokens.dtype == np.uint16 and isinstance(tokens, np.memmap)
        ids = [[*expected.encode(text), expected.end_of_document] for text in texts]
        assert tokens.tolist() == list(chain.from_iterable(ids))
    val = "".join(texts).encode()
    assert prepared.val_gzip_bpb == 8 * len(gzip.compress(val, 9)) / len(val)
    assert (prepared.corpus_name, prepared.corpus_hash) == ("code", corpus.hash)


def test_each_tokenizer_gets_its_own_folder(source, capfd, monkeypatch):
    """A given tokenizer is not trained, and its tokens are reused. Ids of a large vocabulary are uint32."""
    given, other = (train_tokenizer(TEXTS[:count], 350) for count in (50, 100))
    for tokenizer in (given, other, given):
        prepared = prepare([str(source)], "bytes", 0, source.parent / "cache", 16, tokenizer=tokenizer)
        assert prepared.tokenizer is tokenizer and tokenizer.decode(prepared.val).startswith("def f")
    message = capfd.readouterr().err
    assert message.count("preparing") == 2 and "training a tokenizer" not in message
    assert prepare_from(source).tokenizer.hash != prepare_from(source, vocab_size=351).tokenizer.hash
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 70_000)
    assert prepare_from(source, "bytes").val.dtype == np.uint32


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new, 1))


def test_a_damaged_folder_is_rebuilt(source, capsys):
    """And so is the index of its text, also if it is that of another text."""
    prepare_from(source)
    (folder,), (index,) = folders(source), folders(source)[0].parent.glob("*.index")
    Corpus([str(source), __file__], folder.parent)
    (other,) = {*folder.parent.glob("*.index")} - {index}
    expected = content(folder), index.read_bytes()
    for damage in (
        lambda: (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[::-1]),
        lambda: os.truncate(folder / "val.bin", 100),
        lambda: (folder / "record.json").write_text("[]"),
        lambda: edit(folder / "record.json", '"lost": 0', '"lost": 1'),
        lambda: train_tokenizer(TEXTS[:50], 350).save(folder),
        lambda: index.write_text("{}"),
        lambda: edit(index, '"train": 1', '"train": 2'),
        lambda: index.write_bytes(other.read_bytes()),
    ):
        damage()
        prepare_from(source)
        assert (content(folder), index.read_bytes()) == expected and folders(source) == [folder]
    assert capsys.readouterr().err.count("preparing") == 6


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_stopped_preparation_is_continued(tmp_path, monkeypatch, kind, capsys):
    """Wherever it was stopped: between documents, in the windows of a long one, or while a record was written."""
    sizes = {"BATCH_CHARS": 1 << 14, "WHOLE": 60_000, "WINDOW": 1 << 13, "OVERLAP": 1 << 9, "SAVE_EVERY": 1}
    for name, size in sizes.items():
        monkeypatch.setattr(preparing, name, size)
    texts = [*TEXTS[:100], LONG[:100_000], *TEXTS[100:], LONG[-90_000:]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def prepare_in(cache: Path) -> dict[str, bytes]:
        prepare([str(tmp_path / "a.jsonl")], kind, 400, cache, 16)
        (folder,) = (path for path in cache.iterdir() if path.is_dir())
        return content(folder)

    whole = prepare_in(tmp_path / "whole")
    done: list[int] = []

    def write_and_stop(path: Path, content: dict, format: str) -> None:
        write_ours(path, content, format)
        if path.name == preparing.PROGRESS:
            done.append(content["done"])
            if len(done) in (1, 3, 6, 7, 10, 12):
                raise KeyboardInterrupt

    monkeypatch.setattr(preparing, "write_ours", write_and_stop)
    for _ in range(6):  # each goes on where the one before was stopped
        with pytest.raises(KeyboardInterrupt):
            prepare_in(tmp_path / "stopped")
    (part,) = (tmp_path / "stopped").glob("*.part")
    with open(part / "train.bin", "ab") as file:
        file.write(b"what was not recorded")
    assert prepare_in(tmp_path / "stopped") == whole
    assert done == [*range(1, len(done) + 1)]
    assert capsys.readouterr().err.count("training a tokenizer") == 2 * (kind == "sentencepiece")
    done.clear()  # and what is damaged meanwhile is made again
    part = tmp_path / "damaged" / part.name
    for damage in (
        lambda: edit(part / preparing.PROGRESS, '"done": 1', '"done": 2'),
        lambda: os.truncate(part / "train.bin", 0),
        lambda: train_tokenizer(TEXTS[:50], 400).save(part),
        lambda: done.extend([0] * 6),  # the next one is not stopped
    ):
        with pytest.raises(KeyboardInterrupt):
            prepare_in(part.parent)
        damage()
    assert prepare_in(part.parent).items() >= whole.items() and done[:7] == [1, 1, 2, 1, 2, 3, 4]


def test_text_that_has_not_changed_is_not_read_again(source, monkeypatch, capfd):
    """But what was said of it is said again. Another size or modification time is seen, and only these are."""
    folder = source.parent / "folder"
    folder.mkdir()
    source = source.rename(folder / source.name)
    (folder / "image.png").write_bytes(b"\0")
    first = prepare_from(folder)
    left_out, *_ = capfd.readouterr().err.splitlines()
    files.warned.clear()
    read = Mock(side_effect=read_documents), Mock(side_effect=sha256)
    monkeypatch.setattr(splitting, "read_documents", read[0])
    monkeypatch.setattr(preparing, "sha256", read[1])

    def counts() -> list[int]:
        for mock in read:
            mock.reset_mock()
        assert prepare_from(folder).corpus_hash == first.corpus_hash
        return [mock.call_count for mock in read]

    assert counts() == [0, 0] and capfd.readouterr().err == left_out + "\n"
    os.utime(source)
    assert counts() == [1, 0]
    os.utime(next(folders(folder)[0].glob("train.bin")))
    assert counts() == [0, 2] and counts() == [0, 0], "hashed once"
    stat = source.stat()
    source.write_text(source.read_text().replace("return", "delete"))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert counts() == [0, 0], "this is not seen"
    with pytest.raises(ValueError, match=r"^the text of folder changed; .* delete the folder of --cache-dir$"):
        prepare_from(folder, vocab_size=351)


def test_two_preparations_of_the_same_text_build_it_once(source, capfd):
    """flock holds between two open files of one process as between two processes."""
    with ThreadPoolExecutor(4) as threads:
        prepared = list(threads.map(prepare_from, [source] * 4))
    assert len({one.train.tobytes() for one in prepared}) == capfd.readouterr().err.count("preparing") == 1


def test_token_files_that_another_process_writes_too_are_refused(source, monkeypatch):
    """As on a file system without locks."""
    monkeypatch.setattr(preparing, "describe_write_error", lambda path, size: nullcontext(path.write_bytes(b"x")))
    with pytest.raises(ValueError, match=r"another process writes \S+/train\.bin too; start one alone$"):
        prepare_from(source, "bytes")


def test_gzip_compresses_evenly_spaced_parts_of_a_long_validation_text(tmp_path, monkeypatch, capsys):
    """5.5 MB of random digits, then as many zeros: only evenly spaced parts compress like the whole."""
    monkeypatch.setattr(preparing, "WHOLE", 1 << 20)  # so it is read in windows
    digits = np.random.default_rng(0).integers(ord("0"), ord("9"), 5_500_000, np.uint8)
    text = digits.tobytes() + b"0" * len(digits)
    (tmp_path / "a.txt").write_bytes(text)
    prepared = prepare([], "bytes", 0, tmp_path, 16, val_names=[str(tmp_path / "a.txt")])
    assert prepared.val_gzip_bpb == pytest.approx(8 * len(gzip.compress(text, 9)) / len(text), rel=0.07)
    assert "gzip -9 has compressed 6," in capsys.readouterr().err


def test_text_that_changes_while_it_is_prepared_leaves_no_folder(source, monkeypatch):
    def grow(*arguments):
        source.write_text(source.read_text() * 2)
        return train_tokenizer(*arguments)

    monkeypatch.setattr(preparing, "train_tokenizer", grow)
    with pytest.raises(ValueError, match=r"^the text of code changed; run the command again, and if"):
        prepare_from(source)
    assert not folders(source)


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    """15 MB of text, in lines of 120 KB."""
    for name, size in {"WHOLE": 1 << 18, "BATCH_CHARS": 1 << 17, "WINDOW": 1 << 15, "OVERLAP": 1 << 10}.items():
        monkeypatch.setattr(preparing, name, size)
    (tmp_path / "large").write_text(("some text, 日本語 " * 6000 + "\n") * 124)
    tracemalloc.start()
    prepare([str(tmp_path / "large")], "bytes", 0, tmp_path, 256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 28e6  # the text has 31 MB of characters
