"""The same ids as transformers, with our tokenizers opened there and with theirs opened here."""

import io
import json
import logging
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from data.workers import encode_job, encode_jobs, make_jobs
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from data import workers
from data.batches import prepare
from data.pretrained import load_pretrained_tokenizer
from data.tokenizer import ByteTokenizer, load_tokenizer, train_tokenizer

TEXT = Path(random.__file__).read_text()  # a module of the standard library
MODEL_TYPES = ["llama", "qwen3", "olmo", "olmo2", "stablelm", "gemma2", "normal-llama"]
PARTS = ["def f(x):", "self", "return", " ", "    ", "\n", "\t", "\t\t", "\r\n", "\0", "\x07", "\x85", "\xa0", "\u200d"]
PARTS += [
    "\ufeff",
    "\ufffd",
    "\u2028",
    "\U0010ffff",
    "😀",
    "語",
    "漢字",
    "é",
    "e\u0301",
    "⁇",
    "<0x41>",
    "9",
    "_",
    "A b",
]


def some_strings(count: int) -> list[str]:
    """From one part to thousands, without U+2581 and special tokens."""
    rng = random.Random(0)

    def text(length: int) -> str:
        parts = (rng.choice(PARTS) if rng.random() < 0.8 else chr(rng.choice(range(0x2580))) for _ in range(length))
        return "".join(parts)

    strings = [text(rng.randint(0, rng.choice([1, 3, 6, 30, 100]))) for _ in range(count - 3)]
    return [*strings, "", TEXT[:8000], "語" * 3000]


STRINGS = some_strings(1000)


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """transformers warns about directories without a model."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


def train_sentencepiece(**options) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() + ["<s> </s>"] * 99),
        model_writer=model,
        vocab_size=500,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


LLAMA: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}
NORMALIZING: dict[str, Any] = {"model_type": "unigram"}  # NFKC, no bytes
END = "<|endoftext|>"


def byte_level_bpe() -> tokenizers.Tokenizer:
    """As GPT-NeoX: runs of spaces are added tokens that are not special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens(["    ", "        "])
    tokenizer.add_special_tokens(["<pad>"])
    return tokenizer


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    """A directory of each kind. All but `unigram` are lossless."""
    root = tmp_path_factory.mktemp("tokenizers")
    folders = {name: root / name for name in ("llama", "unigram", "byte-level", "sentencepiece", "bytes")}
    for folder in folders.values():
        folder.mkdir()
    for name, options in {"llama": LLAMA, "unigram": NORMALIZING}.items():
        (folders[name] / "tokenizer.model").write_bytes(train_sentencepiece(**options))
        fields = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
        (folders[name] / "tokenizer_config.json").write_text(json.dumps(fields))
    byte_level_bpe().save(str(folders["byte-level"] / "tokenizer.json"))
    (folders["byte-level"] / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"__type": "AddedToken", "content": END}})
    )
    train_tokenizer([TEXT] + ["<s> </s>\n"] * 99, 500).save(folders["sentencepiece"])
    ByteTokenizer().save(folders["bytes"])
    folders["llama saved by transformers"] = root / "saved"
    AutoTokenizer.from_pretrained(folders["llama"]).save_pretrained(root / "saved")
    return folders


def their_ids(theirs, text: str, **options) -> list[int]:
    return theirs(text, add_special_tokens=False, **options)["input_ids"]


# --- ours, opened by transformers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "their_class"),
    [
        ("sentencepiece", AutoTokenizer),
        ("sentencepiece", LlamaTokenizer),
        ("sentencepiece", PreTrainedTokenizerFast),
        ("bytes", AutoTokenizer),
        ("bytes", PreTrainedTokenizerFast),
    ],
)
def test_ours_has_the_same_ids_in_transformers(directories, kind, their_class):
    ours, theirs = load_tokenizer(kind, directories[kind]), their_class.from_pretrained(directories[kind])
    assert (len(theirs), theirs.eos_token_id) == (ours.vocab_size, ours.end_of_document)
    for text in STRINGS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == text


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_ours_has_the_same_ids_beside_any_architecture(directories, tmp_path, kind, model_type):
    """AutoTokenizer would take another class for some of them if tokenizer_config.json named none."""
    folder = shutil.copytree(directories[kind], tmp_path / "checkpoint")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = load_tokenizer(kind, folder), AutoTokenizer.from_pretrained(folder)
    for text in STRINGS[::10]:
        assert theirs(text)["input_ids"] == ours.encode(text), text
        assert theirs.decode(ours.encode(text)) == text


def test_where_transformers_differs_from_ours(directories):
    """To it, U+2581 is a space. A reserved piece typed as text is that piece, unless it is told to split them."""
    ours = load_tokenizer("sentencepiece", directories["sentencepiece"])
    theirs = AutoTokenizer.from_pretrained(directories["sentencepiece"])
    for text in STRINGS[::10]:
        assert theirs(text.replace(" ", "\u2581"))["input_ids"] == ours.encode(text)
    assert ours.decode(ours.encode("a\u2581b")) == "a\u2581b"
    for number, piece in enumerate(("<unk>", "<s>", "</s>")):
        assert theirs(f"a{piece}b")["input_ids"] == [*ours.encode("a"), number, *ours.encode("b")]
        assert theirs(f"a{piece}b", split_special_tokens=True)["input_ids"] == ours.encode(f"a{piece}b")
        assert number not in ours.encode(f"a{piece}b")
    ours, theirs = ByteTokenizer(), AutoTokenizer.from_pretrained(directories["bytes"])
    assert theirs("a\u2581</s>")["input_ids"] == [*"a\u2581".encode(), 256]
    assert theirs("a</s>", split_special_tokens=True)["input_ids"] == ours.encode("a</s>") == list(b"a</s>")


# --- theirs, opened by us ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte-level", "llama saved by transformers", "bytes"])
def test_a_tokenizer_json_has_the_same_ids_here(directories, name):
    ours, theirs = load_pretrained_tokenizer(directories[name]), AutoTokenizer.from_pretrained(directories[name])
    assert (ours.vocab_size, ours.end_of_document) == (len(theirs), theirs.eos_token_id)
    for text in STRINGS:
        ids = ours.encode(text)
        assert ids == their_ids(theirs, text), text
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("begins", [True, False])
def test_a_prompt_begins_as_in_transformers(directories, tmp_path, kind, begins):
    """With the beginning-of-text token, or without, as the directory says."""
    shutil.copy(directories["llama"] / "tokenizer.model", tmp_path)
    fields = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<s>", "add_bos_token": begins}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    if kind == "tokenizer.json":
        theirs.save_pretrained(tmp_path)
    ours = load_pretrained_tokenizer(tmp_path)
    assert ours.file == kind
    for text in ("", "once upon a time"):
        assert ours.encode_prompt(text) == theirs(text)["input_ids"]
        assert ours.encode_prompt(text) == [theirs.bos_token_id] * begins + ours.encode(text)


def test_a_prompt_of_llama_begins_with_its_token_unless_told_otherwise(directories, tmp_path):
    """The documented default of LlamaTokenizer."""
    shutil.copy(directories["llama"] / "tokenizer.model", tmp_path)
    fields = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    ours = load_pretrained_tokenizer(tmp_path)
    assert ours.encode_prompt("once") == [1, *ours.encode("once")]


def test_a_sentencepiece_model_with_a_space_in_front_has_the_same_ids_here(directories):
    """Where the text itself begins with a space, transformers puts none in front."""
    ours, theirs = load_pretrained_tokenizer(directories["llama"]), AutoTokenizer.from_pretrained(directories["llama"])
    processor = sentencepiece.SentencePieceProcessor(str(directories["llama"] / "tokenizer.model"))
    spaces = 0
    for text in STRINGS:
        ids = ours.encode(text)
        assert ids == processor.encode(text), text
        assert ids == their_ids(theirs, f" {text}" if text.startswith(" ") else text), text
        spaces += ids != their_ids(theirs, text)
        assert ours.decode(ids) == text
    assert spaces == sum(text.startswith(" ") for text in STRINGS) > 10


def test_a_model_that_normalizes_gives_the_ids_and_the_text_of_sentencepiece(directories):
    ours = load_pretrained_tokenizer(directories["unigram"])
    processor = sentencepiece.SentencePieceProcessor(str(directories["unigram"] / "tokenizer.model"))
    known = 0  # texts that are given back as another text, although each character is known
    for text in STRINGS:
        ids = ours.encode(text)
        assert ids == processor.encode(text)
        assert ours.token_bytes[ids].sum() == len(ours.decode_bytes(ids))
        if processor.unk_id() not in ids:
            assert ours.decode(ids) == processor.decode(ids)
            known += ours.decode(ids) != text
    assert known > 10


@pytest.mark.parametrize("name", ["byte-level", "llama", "llama saved by transformers", "sentencepiece", "bytes"])
def test_text_is_given_back_byte_by_byte(directories, name):
    """For bits per byte: the bytes of the ids are those of the text, and of the space in front."""
    ours = load_pretrained_tokenizer(directories[name])
    space = b" " if name.startswith("llama") else b""
    for text in STRINGS:
        if text and not (name == "llama saved by transformers" and text.startswith(" ")):
            ids = ours.encode(text)
            assert ours.decode(ids) == text
            assert b"".join(ours.decode_bytes([token]) for token in ids) == space + text.encode()
            assert ours.token_bytes[ids].sum() == len(space + text.encode())
            assert ours.encode_array(text, np.dtype("<u4")).tolist() == ids
    assert ours.decode_bytes([*ours.encode("a"), ours.end_of_document, ours.vocab_size + 5]) == space + b"a"
    with pytest.raises(ValueError, match="lone surrogate"):
        ours.encode("\ud800")


@pytest.mark.parametrize("name", ["byte-level", "llama", "llama saved by transformers", "sentencepiece", "bytes"])
def test_a_special_token_typed_as_text_is_text(directories, name):
    ours, theirs = load_pretrained_tokenizer(directories[name]), AutoTokenizer.from_pretrained(directories[name])
    end = theirs.eos_token
    assert their_ids(theirs, end) == [ours.end_of_document]
    for text in (end, f"a{end}b", f"{end}{end}", "<s>", "<unk>", "<pad>"):
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert all(ours.token_bytes[ids] > 0)
        assert ids == their_ids(theirs, text, split_special_tokens=True)


def test_an_added_token_that_is_not_special_is_a_piece(directories):
    ours = load_pretrained_tokenizer(directories["byte-level"])
    ids = ours.encode("x        y")
    assert [ours.decode([token]) for token in ids] == ["x", " " * 8, "y"]


def test_a_special_token_is_never_merged_from_its_characters(tmp_path):
    vocabulary = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}
    write_json(tmp_path, vocabulary, ["< s", "<s >"], [{"id": 4, "content": "<s>", "special": True}])
    assert load_pretrained_tokenizer(tmp_path).encode("<s>") == [3, 2]
    write_json(tmp_path, vocabulary, [["<", "s"], ["<s", ">"]], [], end="<s>")
    assert load_pretrained_tokenizer(tmp_path).encode("<s>") == [3, 2]


def write_json(folder: Path, vocabulary: dict, merges: list, added: list[dict], end: str | int = 4, **changes) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges} | changes.pop("model", {})
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    fields = {"added_tokens": [flags | token for token in added], "model": model, "decoder": decoder} | changes
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    named = {"eos_token": end} if isinstance(end, str) else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps({} if named else {"eos_token_id": [end]}))


def test_truncation_and_padding_are_not_applied(directories, tmp_path):
    tokenizer = byte_level_bpe()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    ours = load_pretrained_tokenizer(tmp_path)
    for text in ("", "a", TEXT):
        assert ours.encode(text) == load_pretrained_tokenizer(directories["byte-level"]).encode(text)


# --- use --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte-level", "llama", "unigram", "llama saved by transformers"])
def test_a_saved_tokenizer_opens_again_here_and_in_transformers(directories, tmp_path, name):
    ours, theirs = load_pretrained_tokenizer(directories[name]), AutoTokenizer.from_pretrained(directories[name])
    ours.save(tmp_path)
    again, in_transformers = load_tokenizer(ours.kind, tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for attribute in ("kind", "hash", "vocab_size", "end_of_document"):
        assert getattr(again, attribute) == getattr(ours, attribute)
    for text in STRINGS[::10]:
        assert again.encode(text) == ours.encode(text)
        assert their_ids(in_transformers, text) == their_ids(theirs, text)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_the_end_of_a_document_is_saved_wherever_it_was_found(directories, tmp_path, file):
    source, saved = tmp_path / "source", tmp_path / "saved"
    saved.mkdir()
    shutil.copytree(directories["byte-level"], source)
    (source / "tokenizer_config.json").unlink()
    (source / file).write_text(json.dumps({"eos_token_id": [502, 0]}))
    ours = load_pretrained_tokenizer(source)
    ours.save(saved)
    assert ours.end_of_document == 502 == load_pretrained_tokenizer(saved).end_of_document
    assert (
        load_pretrained_tokenizer(saved).hash == ours.hash != load_pretrained_tokenizer(directories["byte-level"]).hash
    )


def test_the_end_in_generation_config_comes_before_that_in_config(directories, tmp_path):
    """As in models for chat, whose replies end with another token than their training texts."""
    source = shutil.copytree(directories["byte-level"], tmp_path / "source")
    (source / "tokenizer_config.json").unlink()
    (source / "config.json").write_text('{"eos_token_id": 0}')
    (source / "generation_config.json").write_text('{"eos_token_id": 502}')
    assert load_pretrained_tokenizer(source).end_of_document == 502


def test_tokens_added_to_a_sentencepiece_model(directories, tmp_path):
    folder = shutil.copytree(directories["llama"], tmp_path / "chat")
    added = {"502": {"content": "<|end|>", "special": True}, "503": {"content": "<tool>", "special": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "added_tokens_decoder": added}))
    ours = load_pretrained_tokenizer(folder)
    assert (ours.vocab_size, ours.end_of_document) == (504, 502)
    assert ours.decode_bytes([502, 503, 501]) == b"<tool>"
    assert ours.encode("<|end|>") == load_pretrained_tokenizer(directories["llama"]).encode("<|end|>")
    encoded = list(encode_jobs(make_jobs([["a"], ["b"]]), ours, np.dtype("<u2"), 2))
    assert [ids for _, ids in encoded] == [encode_job(job, ours, np.dtype("<u2")) for job, _ in encoded]


def test_several_processes_give_the_same_ids(directories, monkeypatch):
    monkeypatch.setattr(workers, "JOB_BYTES", 5000)
    ours = load_pretrained_tokenizer(directories["byte-level"])
    jobs = list(make_jobs([text] for text in STRINGS))
    encoded = list(encode_jobs(jobs, ours, np.dtype("<u2"), 2))
    assert len(jobs) > 5
    assert encoded == [(job, encode_job(job, ours, np.dtype("<u2"))) for job in jobs]


@pytest.mark.parametrize("name", ["byte-level", "llama"])
def test_a_corpus_is_prepared_with_it(directories, tmp_path, name):
    ours = load_pretrained_tokenizer(directories[name])
    documents = [TEXT[start : start + 500] for start in range(0, len(TEXT), 500)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prepared = prepare([str(tmp_path / "text.jsonl")], "bytes", 0, tmp_path / "cache", 16, tokenizer=ours)
    tokens = np.concatenate([prepared.train.tokens, prepared.val.tokens])
    ends = np.flatnonzero(tokens == ours.end_of_document)
    texts = [ours.decode(part[:-1].tolist()) for part in np.split(tokens, ends + 1)[:-1]]
    assert sorted(texts) == sorted(documents)


# --- directories that are refused -------------------------------------------------------------------------------------

VOCABULARY = {"a": 0, "b": 1, "ab": 2}
SPECIAL: dict[str, Any] = {"id": 3, "content": "<s>", "special": True}
BAD_JSON: dict[str, dict[str, Any]] = {
    "model.type is 'WordPiece'; only BPE is supported": {"model": {"type": "WordPiece"}},
    "the id of 'a' is 'x', not a number": {"model": {"vocab": {"a": "x"}}},
    "the id of 'z' is 4194304, not a number from 0 to 4194303": {"model": {"vocab": VOCABULARY | {"z": 1 << 22}}},
    "decoder is WordPiece; only ByteLevel": {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    "decoder is missing": {"decoder": None},
    "decoder replaces .*; only \u2581 by a space": {
        "decoder": {"type": "Replace", "pattern": {"String": "_"}, "content": " "}
    },
    "the vocabulary lacks the token that ends a document, 9": {"end": 9},
    "the vocabulary lacks the token that ends a document, '</s>'": {"end": "</s>"},
    "'a' is both a special token and an ordinary piece": {"end": "a"},
    "ids of added_tokens contradict the vocabulary": {"added": [SPECIAL | {"id": 7}], "end": 7},
    "damaged: precompiled_charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    "damaged: the `tokenizers` library fails with it": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}
    },
    "Token `q` out of vocabulary": {"model": {"merges": ["a q"]}},
}


@pytest.mark.parametrize("message", BAD_JSON)
def test_a_tokenizer_json_that_cannot_be_used_is_refused_in_one_line(tmp_path, message):
    changes: dict[str, Any] = {"added": [SPECIAL], "end": 3, **BAD_JSON[message]}
    added, end = changes.pop("added"), changes.pop("end")
    write_json(tmp_path, VOCABULARY, ["a b"], added, end, **changes)
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{message}") as error:
        load_pretrained_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.model", None, "holds no tokenizer: neither tokenizer.json nor tokenizer.model"),
        ("tokenizer.model", b"", "tokenizer.model: not a readable SentencePiece model"),
        ("tokenizer.model", b"no model", "tokenizer.model: not a readable SentencePiece model"),
        ("tokenizer.json", b"{", "tokenizer.json is damaged: not a JSON object"),
        ("tokenizer.json", b"[]", "tokenizer.json is damaged: not a JSON object"),
        ("tokenizer.json", b"{}", "tokenizer.json: damaged: not a tokenizer"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {}}, "added_tokens": 3}', "damaged: not a tokenizer"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is damaged: not a JSON object"),
        ("tokenizer_config.json", b'{"eos_token": "<end>"}', "lacks the token that ends a document, '<end>'"),
        ("tokenizer_config.json", b'{"eos_token": "="}', "'=' is both a special token and an ordinary piece of text"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 3}}', "the added tokens in .* are damaged"),
        ("added_tokens.json", b'{"<a>": 9999999}', "the id of the added token '<a>' is 9999999"),
    ],
)
def test_a_damaged_directory_is_refused_in_one_line(directories, tmp_path, file, content, message):
    folder = shutil.copytree(directories["llama"], tmp_path / "damaged")
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained_tokenizer(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_a_directory_without_an_end_of_document_is_refused(directories, tmp_path):
    shutil.copy(directories["byte-level"] / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer.json: no token ends a document; name it as eos_token in .*$"):
        load_pretrained_tokenizer(tmp_path)


def test_a_missing_package_is_named(directories, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ValueError, match=r"tokenizer.json: needs the package `tokenizers`; run `pip install tokenizers`$"
    ):
        load_pretrained_tokenizer(directories["byte-level"])
