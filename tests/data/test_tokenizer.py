"""Tokenizers are lossless for every string, and training them is deterministic."""

import re
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizer as tokenizers
from data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer, train_tokenizer

LIBRARY = Path(sysconfig.get_path("stdlib"))
RESERVED = ["<unk>", "<s>", "</s>", "<0x41>", "<0x0A>", "<pad>", "⁇", " ⁇ "]
AWKWARD = [
    *(
        "\u2581",
        "\u2581\u2581a",
        " \u2581 ",
        "\u2585",
        "\0",
        "\r",
        "\r\n",
        "\n\r",
        "\t",
        "\t\t \t",
        " ",
        "   ",
        "\n\n    ",
    ),
    *(
        "\ufeff",
        "\ufffd",
        "\uffff",
        "\u2028",
        "\x85",
        "\xa0",
        "\u200d",
        "é",
        "e\u0301",
        "ﬁ",
        "Å",
        "\u212b",
        "\U0010ffff",
    ),
    *("😀", "\U0001f469\u200d\U0001f469\u200d\U0001f467"),
]
PIECES = st.one_of(
    st.text(), st.sampled_from(RESERVED + AWKWARD), st.text(alphabet=" \n\t\r\u2581<>/s0x41def:", min_size=1)
)
STRINGS = st.lists(PIECES, max_size=6).map("".join)


@pytest.fixture(scope="module")
def trained() -> SentencePieceTokenizer:
    files = ("argparse.py", "typing.py", "textwrap.py", "tarfile.py", "turtle.py")
    return train_tokenizer([(LIBRARY / file).read_text() for file in files] + RESERVED * 50, 700)


@pytest.fixture(scope="module", params=["sentencepiece", "bytes"])
def tokenizer(request, trained) -> Tokenizer:
    return trained if request.param == "sentencepiece" else ByteTokenizer()


def assert_lossless(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert all(tokenizer.token_bytes[ids] > 0), "text became a reserved id"


@settings(max_examples=500, deadline=None)
@given(text=STRINGS)
def test_any_string_round_trips(tokenizer, text):
    assert_lossless(tokenizer, text)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(text=STRINGS)
def test_ten_thousand_strings_round_trip(trained, text):
    assert_lossless(trained, text)


@pytest.mark.parametrize("text", ["", *RESERVED, *AWKWARD, *(2 * text for text in RESERVED + AWKWARD)])
def test_awkward_strings_round_trip(tokenizer, text):
    for around in ("{}", " {} ", "a{}b", "\n{}\n"):
        assert_lossless(tokenizer, around.format(text))


def test_every_character_round_trips(tokenizer):
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert_lossless(tokenizer, text)


def test_long_text_without_a_line_end_round_trips(tokenizer):
    assert_lossless(tokenizer, "abc é😀" * 20_000)


def python_files() -> list[Path]:
    return sorted(path for path in LIBRARY.rglob("*.py") if "site-packages" not in path.parts)


def assert_file_round_trips(tokenizer: Tokenizer, path: Path) -> bool:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:  # some of the library's tests use other encodings on purpose
        return False
    assert_lossless(tokenizer, text)
    return True


def test_files_of_the_standard_library_round_trip(trained):
    assert all(assert_file_round_trips(trained, path) for path in python_files()[::40] if "test" not in str(path))


@pytest.mark.slow
def test_every_file_of_the_standard_library_round_trips(trained):
    files = python_files()
    assert sum(assert_file_round_trips(trained, path) for path in files) > 0.98 * len(files) > 500


@pytest.mark.parametrize("text", ["\ud800", "abc\udfff", "\ud83d \ude00"])
def test_a_lone_surrogate_is_refused(tokenizer, text):
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode(text)


def test_the_end_of_document_token_decodes_to_nothing(tokenizer):
    ids = [*tokenizer.encode("a"), tokenizer.end_of_document, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.token_bytes[tokenizer.end_of_document] == 0
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size


def test_a_character_decodes_byte_by_byte(tokenizer):
    ids = tokenizer.encode("\U0010fffd")  # not in the training text, so encoded as bytes
    assert [tokenizer.decode_bytes([token]) for token in ids] == [b"\xf4", b"\x8f", b"\xbf", b"\xbd"]
    assert tokenizer.decode(ids[:2]) == "\ufffd"


def test_whitespace_has_its_own_pieces(trained):
    """Newlines and tabs are not encoded as bytes, and indentation takes few tokens."""
    for text in ("\n", "\t", " ", "\n\n"):
        (token,) = trained.encode(text)
        assert not trained._processor.is_byte(token)
    assert len(trained.encode("):\n        return")) <= 4
    rare = train_tokenizer(["no line end here"] * 9, 270)
    assert not any(rare._processor.is_byte(token) for token in rare.encode("\n\t"))


def test_pieces_do_not_cross_words(trained):
    pieces = [trained.decode([token]) for token in range(trained.vocab_size) if not trained._processor.is_byte(token)]
    assert " self" in pieces and "):\n" in pieces and " " * 8 in pieces
    for piece in pieces:
        assert re.fullmatch(r" +| ?([a-zA-Z]*|[^a-zA-Z ]*)", piece), piece


def test_training_is_deterministic():
    texts = [(LIBRARY / "argparse.py").read_text()]
    one, two = train_tokenizer(texts, 500), train_tokenizer(texts, 500)
    assert one.hash == two.hash and one.model == two.model
    assert one.vocab_size == 500
    assert train_tokenizer(texts, 501).hash != one.hash


def test_training_is_silent(capfd):
    train_tokenizer(["some text to learn from\n"] * 9, 280)
    assert capfd.readouterr() == ("", "")


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tokenizer.kind, tmp_path)
    assert (loaded.kind, loaded.hash, loaded.vocab_size) == (tokenizer.kind, tokenizer.hash, tokenizer.vocab_size)
    assert loaded.encode("def f():\n\treturn '😀'") == tokenizer.encode("def f():\n\treturn '😀'")
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    tokenizer.save(tmp_path)  # replaces the files, so that half a file is never seen
    after = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert before.keys() == after.keys() and not before.items() & after.items()


@pytest.mark.parametrize("content", [None, b"", b"no model"])
def test_an_unreadable_model_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer.model: not a readable SentencePiece model$"):
        load_tokenizer("sentencepiece", tmp_path)


def test_a_vocabulary_too_large_for_the_text_is_refused_with_the_maximum():
    texts = ["the cat sat on the mat\n", "a dog and a frog\n"]
    with pytest.raises(ValueError, match=r"^--vocab-size 2048 is too large for this text; use at most \d+$") as error:
        train_tokenizer(texts, 2048)
    largest = int(str(error.value).split()[-1])
    assert train_tokenizer(texts, largest).vocab_size == largest
    with pytest.raises(ValueError, match=f"at most {largest}$"):
        train_tokenizer(texts, largest + 1)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 260])
def test_a_vocabulary_too_small_for_the_characters_is_refused_with_the_minimum(size):
    texts = ["the cat sat on the mat\n"] * 3
    with pytest.raises(ValueError, match=rf"^--vocab-size {size} cannot hold .* use at least \d+$") as error:
        train_tokenizer(texts, size)
    smallest = int(str(error.value).split()[-1])
    assert train_tokenizer(texts, smallest).vocab_size == smallest


def test_the_sample_is_bounded_and_spread_evenly(monkeypatch):
    monkeypatch.setattr(tokenizers, "SAMPLE_BYTES", 100_000)
    monkeypatch.setattr(tokenizers, "SAMPLE_CHARS", 100)
    lines = [f"{number:07}\n" for number in range(100_000)]
    texts = ("".join(lines[start : start + 1000]) for start in range(0, 100_000, 1000))
    kept = "".join(tokenizers._sample(texts)).split()
    assert 50_000 < 8 * len(kept) <= 100_000
    tenths = [sum(int(line) // 10_000 == tenth for line in kept) for tenth in range(10)]
    assert max(tenths) < 1.2 * min(tenths)
    assert tokenizers._sample(["a\nb", "c"]) == ["a\nb", "c"]
