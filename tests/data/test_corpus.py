"""How documents are split into training and validation text, and what the hash of a corpus depends on."""

import hashlib
import json
from pathlib import Path

import pytest

from data.corpus import Corpus

TEXTS = [f"document {number} é\n" * (number % 7 + 1) for number in range(300)]


def jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(corpus: Corpus, split) -> list[str]:
    return ["".join(document) for document in corpus.documents(split)]


def held_out(text: str) -> bool:
    """The rule for holding out documents, computed with all 256 bits."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) < 2**256 // 10


def test_documents_in_the_lowest_tenth_of_hashes_are_held_out_with_their_copies(tmp_path):
    corpus = Corpus([jsonl(tmp_path / "a.jsonl", TEXTS * 2)], tmp_path)
    assert texts_of(corpus, "val") == [text for text in TEXTS * 2 if held_out(text)]
    assert texts_of(corpus, "train") == [text for text in TEXTS * 2 if not held_out(text)]
    assert 30 < len(texts_of(corpus, "val")) < 100
    for split in ("train", "val"):
        assert corpus.sizes[split] == sum(len(text.encode()) + 1 for text in texts_of(corpus, split))


def test_the_split_does_not_depend_on_order_or_packing_of_documents(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}").write_text(text)
    one = Corpus([jsonl(tmp_path / "a.jsonl", TEXTS)], tmp_path)
    backwards = Corpus([jsonl(tmp_path / "b.jsonl", TEXTS[::-1])], tmp_path)
    files = Corpus([str(folder)], tmp_path)
    two = Corpus([jsonl(tmp_path / "c.jsonl", TEXTS[:100]), jsonl(tmp_path / "d.jsonl", TEXTS[100:])], tmp_path)
    for split in ("train", "val"):
        expected = texts_of(one, split)
        assert expected == texts_of(backwards, split)[::-1] == texts_of(files, split) == texts_of(two, split)
    assert one.hash == files.hash == two.hash != backwards.hash
    assert len(one.hash) == 64 and (files.name, two.name) == ("folder", "c+d")


def test_the_name_of_many_sources_fits_in_a_file_name(tmp_path):
    names = [jsonl(tmp_path / f"{'語' * 20}{number}.jsonl", ["text"]) for number in range(5)]
    assert Corpus(names, tmp_path).name == f"{'語' * 20}0+" + "語" * 6, "80 bytes, three per character"


@pytest.mark.parametrize("lowest_tenth", [True, False])
def test_if_none_or_all_would_be_held_out_the_lowest_hash_is(tmp_path, lowest_tenth):
    texts = [text for text in TEXTS if held_out(text) == lowest_tenth][:20]
    corpus = Corpus([jsonl(tmp_path / "a.jsonl", ["", *texts * 2])], tmp_path)
    lowest = min(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    assert texts_of(corpus, "val") == [lowest] * 2, "the document with the lowest hash and its copy"
    assert texts_of(corpus, "train") == [text for text in texts * 2 if text != lowest]


@pytest.mark.parametrize("unit", ["a", "é", "😀語a\n", "one line\n"])
@pytest.mark.parametrize("units", [10, 1009, 125_000, 300_000])  # the third is cut in the first of its two chunks
def test_the_last_tenth_of_a_single_document_is_held_out(tmp_path, unit, units):
    text = unit * units
    (tmp_path / "a.txt").write_text(text, newline="")
    corpus = Corpus([str(tmp_path / "a.txt")], tmp_path)
    (train,), (val,) = texts_of(corpus, "train"), texts_of(corpus, "val")
    assert train + val == text
    assert 0 <= len(train.encode()) - (len(text.encode()) - len(text.encode()) // 10) <= 3
    assert abs(corpus.sizes["val"] - len(val.encode()) - 1) <= 3
    twenty = Corpus([jsonl(tmp_path / "a.jsonl", [text] * 20)], tmp_path)
    assert texts_of(twenty, "train") == [train] * 20 and texts_of(twenty, "val") == [val] * 20


def test_the_last_tenth_of_each_of_a_few_documents_is_held_out(tmp_path):
    texts = ["a long text " * 1000, *(f"note {number}\n" * 10 for number in range(18))]
    corpus = Corpus([jsonl(tmp_path / "a.jsonl", texts)], tmp_path)
    cuts = [len(text) - len(text) // 10 for text in texts]
    assert texts_of(corpus, "train") == [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    assert texts_of(corpus, "val") == [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    digests = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    assert corpus.hash != hashlib.sha256(digests).hexdigest(), "as when whole documents were"


@pytest.mark.parametrize("content", ["", '{"text": ""}\n'])
def test_a_source_without_text_is_refused(tmp_path, content):
    (tmp_path / "empty.jsonl").write_text(content)
    (tmp_path / "full.txt").write_text("text")
    with pytest.raises(ValueError, match=r"^--data .*empty.jsonl: contains no text$"):
        Corpus([str(tmp_path / "full.txt"), str(tmp_path / "empty.jsonl")], tmp_path)
