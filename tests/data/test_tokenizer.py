"""Tokenizers are lossless for every string, and trained on a bounded sample of the text."""

import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizer as tokenizers
from data.prepare import FORMAT_VERSION
from data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer, train_tokenizer

LIBRARY = Path(sysconfig.get_path("stdlib"))
RESERVED = ["<unk>", "<s>", "</s>", "<0x41>", "<0x0A>", "<pad>", "⁇", " ⁇ "]
AWKWARD = [*"\0\x85\xa0é\u212b\u2028\u2581\ufb01\ufeff\ufffd\U0010ffff", "\u2581\u2581a", " \u2581 ", "\r\n", "\n\r"]
AWKWARD += ["\t\t \t", "   ", "\n\n    ", "e\u0301", "\U0001f469\u200d\U0001f467"]
LIKE_RESERVED = st.text(alphabet=" \n\t\r\u2581<>/s0x41def:", min_size=1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # those of UTF-8; codec="utf-8" takes seconds
PIECES = st.one_of(TEXT, st.sampled_from(RESERVED + AWKWARD), LIKE_RESERVED)


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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.lists(PIECES, max_size=6).map("".join))
def test_any_string_round_trips(tokenizer, text):
    assert_lossless(tokenizer, text)


def test_every_character_and_long_lines_round_trip(trained):
    assert_lossless(trained, "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)])))
    assert_lossless(trained, "abc é😀" * 20_000)


# Texts of one kind of character, without spaces, without line ends; of marks that SentencePiece takes for its own.
ODD = ["GATTACA\n", *"a \t\u2581\u2585", "今天天气很好", "▁▂▃▄▅▆▇█\n", "load ▅▅ ok\n", "one\ntwo\n", "a\0b", "😀😃"]
ODD += ["\ufeffabc", "\ufffd x", "a\xa0b", "CC(=O)OC1=CC\n", "<0x0A><s></s>", " ⁇ ", "x\r\n", "\n\n\n\na"]


@pytest.mark.parametrize("unit", [unit for unit in ODD if unit != "\u2585"])
def test_a_tokenizer_of_any_text_is_lossless(unit):
    """Of any text that it can be trained on, at the smallest and the largest vocabulary, which errors name."""
    for size, past, problem in ((1, -1, "cannot hold .*; use at least"), (60_000, 1, "is too large .*; use at most")):
        with pytest.raises(ValueError, match=rf"^--vocab-size {size} {problem} \d+$") as error:
            train_tokenizer([unit * 3000], size)
        limit = int(str(error.value).split()[-1])
        with pytest.raises(ValueError, match=f" {limit}$"):
            train_tokenizer([unit * 3000], limit + past)
        tokenizer = train_tokenizer([unit * 3000], limit)
        assert tokenizer.vocab_size == limit
        for text in ["A B", unit * 3, *ODD, *RESERVED, *AWKWARD]:
            for around in ("{}", " {}  ", "a{}b", "\n{}\n"):
                assert_lossless(tokenizer, around.format(text))


def test_a_batch_has_the_ids_of_its_texts(tokenizer):
    texts = ["", *RESERVED, *AWKWARD, "line\n" * 9000]
    assert [list(ids) for ids in tokenizer.encode_batch(texts)] == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_prompt("a b") == tokenizer.encode("a b")
    for text, (ids, starts) in zip(texts, tokenizer.encode_with_starts(texts), strict=True):
        parts = [text.encode()[start:end] for start, end in pairwise([*starts.tolist(), len(text.encode())])]
        assert parts == [tokenizer.decode_bytes([token]) for token in ids]
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.encode("abc\ud800")


def test_the_end_of_document_token_decodes_to_nothing(tokenizer):
    ids = [*tokenizer.encode("a"), tokenizer.end_of_document, *tokenizer.encode("\U0010fffd")]
    assert tokenizer.decode(ids) == "a\U0010fffd" and len(ids) == 6, "unknown characters are four bytes"
    assert tokenizer.decode(ids[:4]) == "a\ufffd" and tokenizer.token_bytes[tokenizer.end_of_document] == 0


@pytest.mark.parametrize("text", ["\0", "\u2585\u2585\n", "\r\n"])
def test_a_text_of_which_nothing_is_learned_is_refused(text):
    with pytest.raises(ValueError, match=r"^SentencePiece learns nothing from this text.*; use --tokenizer bytes$"):
        train_tokenizer([text * 2000], 261)


def test_the_sample_is_bounded_and_spread_evenly(monkeypatch):
    monkeypatch.setattr(tokenizers, "SAMPLE_BYTES", 130_000)
    monkeypatch.setattr(tokenizers, "SAMPLE_CHARS", 100)
    lines = [f"{number:07}\u3000\n" for number in range(100_000)]
    kept = "".join(tokenizers._sample(["".join(lines)])).split()
    assert 65_000 < 11 * len(kept) <= 130_000 and kept[0] == "0000000"
    tenths = [sum(int(line) // 10_000 == tenth for line in kept) for tenth in range(10)]
    assert max(tenths) < 1.2 * min(tenths)


def test_the_ids_of_a_text_are_those_of_this_format():
    """Other settings of the trainer need another FORMAT_VERSION: prepared folders keep tokens."""
    unit = "    return self.x1  # of the characteristically\n\tif a == 10:\n"
    rare = "αβγ\n" * 1100 + "ö" * 10 + "é"  # a block of more than 4 kB, and a letter that is left to its bytes
    ids = "294 299 298 321 327 313 260 320 289 293 301 316 308 308 3 274 280 287 279 322 263 3 199 173 303 243 "
    ids += "176 133 230 154 133 262 329"
    text = "    return self.x1  # of the characters\n\n\tif a == 100:\té ﬁ▁αβγö"
    found = train_tokenizer([unit * 600 + rare], 330).encode(text)
    assert (FORMAT_VERSION, " ".join(map(str, found))) == (7, ids)
