"""What a prepared folder holds, when it is used again, and when it is rebuilt."""

import errno
import gzip
import json
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from data import prepare as preparing
from data.corpus import SPLITS, Corpus
from data.prepare import Prepared, prepare
from data.tokenizer import ByteTokenizer, train_tokenizer

TEXTS = [f"def f{number}(x):\n    return x + {number}  # é \u2581 <s>\n" * 3 for number in range(200)]


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def prepare_from(source: Path, kind: str = "sentencepiece", vocab_size: int = 350, context: int = 16) -> Prepared:
    return prepare([str(source)], kind, vocab_size, source.parent / "cache", context)


def folders(source: Path) -> list[Path]:
    return [path for path in (source.parent / "cache").iterdir() if path.is_dir()]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("kind", "batch"), [("sentencepiece", 1), ("sentencepiece", 1 << 20), ("bytes", 1000)])
def test_token_files_contain_each_document_and_an_end_token(source, monkeypatch, kind, batch):
    """However much is encoded at a time, and with how many threads, by a tokenizer of the training text."""
    monkeypatch.setattr(preparing, "BATCH_CHARS", batch)
    prepared = prepare_from(source, kind)
    corpus, tokenizer = Corpus([str(source)], source.parent), prepared.tokenizer
    expected = ByteTokenizer() if kind == "bytes" else train_tokenizer(corpus.chunks("train"), 350)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.hash) == (kind, expected.vocab_size, expected.hash)
    for split, tokens in zip(SPLITS, (prepared.train, prepared.val), strict=True):
        texts = ["".join(chunks) for _, chunks in corpus.documents(split)]
        assert tokens.dtype == np.uint16 and isinstance(tokens, np.memmap)
        ids = [[*expected.encode(text), expected.end_of_document] for text in texts]
        assert tokens.tolist() == list(chain.from_iterable(ids))
    val = "".join(texts).encode()
    assert prepared.val_gzip_bpb == 8 * len(gzip.compress(val, 9)) / len(val)
    assert (prepared.corpus_name, prepared.corpus_hash) == ("code", corpus.hash)


LONG = "".join(sorted(TEXTS)) + "no line end, 日本語 " * 90_000 + "\n\n\nx" * 90_000 + "the end"  # 2.5 MB, in chunks


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_the_ids_of_a_document_are_those_of_its_text(tmp_path, kind):
    """Without marks of the chunks in which it is read, whether it has line ends or not. Its tail is held out."""
    write(tmp_path / "a.txt", LONG)
    tokenizer = ByteTokenizer() if kind == "bytes" else train_tokenizer([LONG[:100_000]], 400)
    prepared = prepare([str(tmp_path / "a.txt")], kind, 0, tmp_path / "cache", 16, tokenizer)
    corpus = Corpus([str(tmp_path / "a.txt")], tmp_path)
    for split, tokens in zip(SPLITS, (prepared.train, prepared.val), strict=True):
        text = "".join(corpus.chunks(split))
        assert tokens.tolist() == [*tokenizer.encode(text), tokenizer.end_of_document], split


@pytest.mark.parametrize("whole", [100, 1 << 14])
def test_a_document_too_long_for_one_text_is_encoded_in_windows_that_overlap(tmp_path, monkeypatch, whole):
    for name, size in {"WHOLE": whole, "WINDOW": 1 << 13, "OVERLAP": 1 << 9, "WINDOWS": 3}.items():
        monkeypatch.setattr(preparing, name, size)
    text = LONG[:300_000] + LONG[-300_000:]
    write(tmp_path / "a.txt", text)
    tokenizer = train_tokenizer([LONG], 400)
    prepared = prepare([str(tmp_path / "a.txt")], "", 0, tmp_path / "cache", 16, tokenizer)
    train, val = prepared.train[:-1], prepared.val[:-1]
    assert tokenizer.decode(train) + tokenizer.decode(val) == text
    expected = tokenizer.encode(tokenizer.decode(train))
    assert len(train) < 1.001 * len(expected), "windows add nothing where they meet"


def write(path: Path, text: str) -> None:
    path.write_text(text, newline="")


def test_large_vocabularies_use_uint32(source, tmp_path):
    class Wide(ByteTokenizer):
        vocab_size = 70_000

        def encode_batch(self, texts):
            return [np.array([69_000 + byte for byte in text.encode()]) for text in texts]

    prepared = prepare([str(source)], "bytes", 0, tmp_path, 16, tokenizer=Wide())
    assert prepared.val.dtype == np.uint32 and prepared.val.max() > 69_000


def test_a_prepared_corpus_is_reused(source, capfd):
    first = prepare_from(source)
    (folder,) = folders(source)
    assert capfd.readouterr().err.startswith(f"preparing {folder} from 27 kB of text\ntraining a tokenizer")
    second = prepare_from(source, context=32)  # token files do not depend on it
    assert folders(source) == [folder] and capfd.readouterr() == ("", "")
    assert np.array_equal(first.val, second.val)
    assert first.tokenizer.hash == second.tokenizer.hash and first.val_gzip_bpb == second.val_gzip_bpb


def test_each_text_and_each_tokenizer_gets_its_own_folder(source, capfd):
    """A given tokenizer is not trained, and its tokens are reused."""
    names, cache = [str(source)], source.parent / "cache"
    given, other = (train_tokenizer(TEXTS[:count], 350) for count in (50, 100))
    assert given.hash != other.hash
    for tokenizer in (given, other, given):
        prepared = prepare(names, "bytes", 0, cache, 16, tokenizer=tokenizer)
        assert prepared.tokenizer is tokenizer
        assert tokenizer.decode(prepared.val).startswith("def f")
    message = capfd.readouterr().err
    assert message.count("preparing") == 2 and "training a tokenizer" not in message
    hashes = {prepare_from(source).tokenizer.hash, prepare_from(source, vocab_size=351).tokenizer.hash}
    source.write_text(source.read_text().replace("return", "yield"))
    changed = prepare_from(source)
    assert len({changed.tokenizer.hash, *hashes}) == 3 and len(folders(source)) == 5
    assert "yield" in changed.tokenizer.decode(changed.val)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[::-1]),
        lambda folder: os.truncate(folder / "val.bin", 100),
        lambda folder: (folder / "train.bin").unlink(),
        lambda folder: (folder / "record.json").write_text("[]"),
        lambda folder: (folder / "tokenizer.model").unlink(),
        lambda folder: train_tokenizer(TEXTS[:50], 350).save(folder),
    ],
)
def test_a_damaged_or_unfinished_folder_is_rebuilt(source, damage, capsys):
    prepare_from(source)
    (folder,) = folders(source)
    expected = content(folder)
    damage(folder)
    prepare_from(source)
    assert content(folder) == expected and folders(source) == [folder]
    assert capsys.readouterr().err.count("preparing") == 2
    os.truncate(folder.rename(f"{folder}.part") / "train.bin", 100)  # as a process that was killed leaves it
    prepare_from(source)
    assert content(folder) == expected and folders(source) == [folder]


def test_two_preparations_of_the_same_text_build_it_once(source, capfd):
    """flock holds between two open files of one process as between two processes."""
    with ThreadPoolExecutor(4) as threads:
        prepared = list(threads.map(prepare_from, [source] * 4))
    assert len({one.train.tobytes() for one in prepared}) == 1
    assert capfd.readouterr().err.count("preparing") == 1


def test_a_full_disk_names_the_file_and_leaves_nothing(source, file_size_limit):
    needed = 2 * Corpus([str(source)], source.parent).sizes["train"]
    message = rf"train.bin cannot be written: .*; it needs {needed:,} bytes, and"
    with file_size_limit(needed - 100), pytest.raises(OSError, match=message) as error:
        prepare_from(source, "bytes")
    assert error.value.errno == errno.EFBIG and "\n" not in str(error.value) and not folders(source)


def test_a_split_shorter_than_one_window_is_refused(source):
    length = len(prepare_from(source).val)
    assert prepare_from(source, context=length - 1)
    with pytest.raises(ValueError, match=rf"^--data {source}: the validation text .* --context {length} needs .*"):
        prepare_from(source, context=length)
    (source.parent / "val.txt").write_text("short")
    with pytest.raises(ValueError, match=rf"^--val-data {source.parent}/val.txt: the validation text has at most 6 "):
        prepare([str(source)], "bytes", 0, source.parent, 16, val_names=[str(source.parent / "val.txt")])
    assert len(prepare([], "bytes", 0, source.parent, 16, val_names=[str(source)]).val) > 10 * length


def test_what_cannot_be_prepared_leaves_no_folder(source, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^--vocab-size 60000 is too large for this text; use at most \d+$"):
        prepare_from(source, vocab_size=60_000)
    assert not folders(source)
    with pytest.raises(ValueError, match=r"the training text has at most .* tokens, but --context 99999 needs 100000"):
        prepare([str(source)], "sentencepiece", 2048, tmp_path / "other", 99_999)
    assert not (tmp_path / "other").exists()

    def grow(*arguments):
        source.write_text(source.read_text() * 2)
        return train_tokenizer(*arguments)

    monkeypatch.setattr(preparing, "train_tokenizer", grow)
    with pytest.raises(ValueError, match=r"^the text of code changed while it was read; run the command again$"):
        prepare_from(source)
    assert not folders(source)


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    """15 MB of text, in lines of 120 KB."""
    for name, size in {"WHOLE": 1 << 18, "WINDOW": 1 << 15, "OVERLAP": 1 << 10}.items():
        monkeypatch.setattr(preparing, name, size)
    (tmp_path / "large").write_text(("some text, 日本語 " * 6000 + "\n") * 124)
    tracemalloc.start()
    try:
        prepare([str(tmp_path / "large")], "bytes", 0, tmp_path, 256)
        assert tracemalloc.get_traced_memory()[1] < 28e6  # the text has 31 MB of characters
    finally:
        tracemalloc.stop()
