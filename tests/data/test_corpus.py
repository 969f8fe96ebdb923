"""How documents are split into training and validation text, and what the hash of a corpus depends on."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from data import corpus as splitting
from data import sources
from data.corpus import Corpus

TEXTS = [f"document {number} é\n" * (number % 7 + 1) for number in range(900)]


def jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(corpus: Corpus, split: str) -> list[str]:
    return ["".join(chunks) for part, _, chunks in corpus.parts() if part == split]


def test_whole_documents_are_held_out_in_the_order_of_their_hashes_with_their_copies(tmp_path):
    corpus = Corpus([jsonl(tmp_path / "a.jsonl", ["", *TEXTS * 2])], tmp_path)
    expected, size = set(), 0
    for text in sorted(TEXTS, key=lambda text: sha256(text.encode()).digest()):
        if size < sum(len(text.encode()) for text in TEXTS) / 10:
            expected.add(text)
            size += len(text.encode())
    assert texts_of(corpus, "val") == [text for text in TEXTS * 2 if text in expected]
    assert texts_of(corpus, "train") == [text for text in TEXTS * 2 if text not in expected]
    assert all(begins for _, begins, _ in corpus.parts())
    for split in ("train", "val"):
        assert corpus.sizes[split] == sum(len(text.encode()) + 1 for text in texts_of(corpus, split))


def test_the_split_does_not_depend_on_order_or_packing_of_documents(tmp_path):
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / f"folder/{number:03}").write_text(text)
    one = Corpus([jsonl(tmp_path / f"a{50 * 'é'}.jsonl", TEXTS)], tmp_path)
    backwards = Corpus([jsonl(tmp_path / "b.jsonl", TEXTS[::-1])], tmp_path)
    files = Corpus([str(tmp_path / "folder")], tmp_path / "folder/.cache")  # its own files are no text
    two = Corpus([jsonl(tmp_path / "c.jsonl", TEXTS[:100]), jsonl(tmp_path / "d.jsonl", TEXTS[100:])], tmp_path)
    for split in ("train", "val"):
        expected = texts_of(one, split)
        assert expected == texts_of(backwards, split)[::-1] == texts_of(files, split) == texts_of(two, split)
    assert one.hash == files.hash == two.hash != backwards.hash
    assert len(one.hash) == 64 and (one.name, files.name, two.name) == ("a" + 39 * "é", "folder", "c+d")


@pytest.mark.parametrize("unit", ["a", "é", "😀語a\n", "one line\n"])
@pytest.mark.parametrize("units", [10, 122, 123, 124, 1009])  # of 9 bytes, the second is cut in its first chunk
def test_the_last_tenth_of_a_single_document_is_held_out(tmp_path, monkeypatch, unit, units):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1 << 10)
    text = unit * units
    (tmp_path / "a.txt").write_text(text, newline="")
    corpus = Corpus([str(tmp_path / "a.txt")], tmp_path)
    (train,), (val,) = texts_of(corpus, "train"), texts_of(corpus, "val")
    assert train + val == text
    assert 0 <= len(train.encode()) - (len(text.encode()) - len(text.encode()) // 10) <= 3
    assert abs(corpus.sizes["val"] - len(val.encode()) - 1) <= 3
    assert [begins for _, begins, _ in corpus.parts()] == [True, False]
    copies = Corpus([jsonl(tmp_path / "a.jsonl", [text] * 20)], tmp_path)
    assert texts_of(copies, "train") == [train] * 20 and texts_of(copies, "val") == [val] * 20


def test_a_long_document_gives_its_last_tenth_and_short_ones_are_whole(tmp_path):
    """A document is long if it has more than a hundredth of all bytes, here 1,000 of 100,000."""
    long = ["one long text " * 3000, "x" * 1001]
    short = ["y" * 1000, *(f"note {number:03}" * 8 for number in range(874)), "rest"]
    corpus = Corpus([jsonl(tmp_path / "a.jsonl", [*long, *short, "z" * 59])], tmp_path)
    assert sum(corpus.sizes.values()) == 100_000 + len(long) * 2 + len(short) + 1
    held_out, trained = texts_of(corpus, "val"), texts_of(corpus, "train")
    assert trained[:2] == [text[: len(text) - len(text) // 10] for text in long]
    assert held_out[:2] == [text[len(text) - len(text) // 10 :] for text in long]
    assert sorted(trained[2:] + held_out[2:]) == sorted([*short, "z" * 59])
    assert 0 <= sum(map(len, held_out[2:])) - sum(map(len, short)) / 10 <= 1000


def test_a_tenth_of_the_bytes_is_held_out_of_any_corpus():
    """2,000 corpora: sizes from Zipf's law, a few long texts, copies, many of one text. More than 1 GB is capped."""
    draw = np.random.default_rng(0)
    for _ in range(2000):
        count = int(10 ** draw.uniform(0, 3.7))
        lengths = np.minimum(draw.zipf(draw.uniform(1.1, 3), count), 10**6) * int(10 ** draw.uniform(0, 3))
        long = int(draw.integers(4))
        lengths[:long] = (10 ** draw.uniform(2, 9.5, long)).astype(int)[:count]
        lengths += max(0, 100_000 - lengths.sum()) // count + 1
        copies = draw.integers(count, size=draw.integers(count + 1)), np.repeat(0, draw.choice([0, 5 * count]))
        texts = np.concatenate([np.arange(count), *copies])
        names = draw.integers(2**64 - 1, size=count, dtype=np.uint64)
        order = draw.permutation(len(texts))
        cuts = splitting._split(names[texts], lengths[texts])
        assert np.array_equal(splitting._split(names[texts[order]], lengths[texts[order]]), cuts[order])
        assert np.array_equal(cuts, cuts[:count][texts]), "copies are cut alike"
        total = lengths[texts].sum()
        assert 0.8 <= (lengths[texts] - cuts).sum() / total / min(0.1, 1e8 / total) <= 1.2


def test_named_validation_text_is_all_of_it_and_its_copies_are_not_trained_on(tmp_path, capsys):
    data, val = jsonl(tmp_path / "data.jsonl", TEXTS), jsonl(tmp_path / "val.jsonl", ["new", TEXTS[5], TEXTS[7]])
    corpus, _ = Corpus([data], tmp_path, [val]), Corpus([data], tmp_path / "other", [val])
    assert texts_of(corpus, "val") == ["new", TEXTS[5], TEXTS[7]]
    assert texts_of(corpus, "train") == [text for text in TEXTS if text not in (TEXTS[5], TEXTS[7])]
    assert "documents of --data left out, because --val-data has them too: 2\n" in capsys.readouterr().err
    assert "has them too: 2" in next((tmp_path / "other").glob("*.index")).read_text(), "also if it was said before"
    others = Corpus([data, val], tmp_path), Corpus([data], tmp_path), Corpus([], tmp_path, [data, val])
    assert len({each.hash for each in (corpus, *others)}) == 4


@pytest.mark.parametrize("texts", [[], [""], [None]])
def test_a_source_without_text_is_refused(tmp_path, texts):
    full, empty = jsonl(tmp_path / "full.jsonl", ["text"]), jsonl(tmp_path / "empty.jsonl", texts)
    for flag, names, val_names in (("--data", [full, empty], []), ("--val-data", [full], [empty])):
        with pytest.raises(ValueError, match=f"^{flag} .*empty.jsonl: contains no text$"):
            Corpus(names, tmp_path, val_names)
