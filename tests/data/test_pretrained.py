"""The same ids as transformers, with our tokenizers opened there and with theirs opened here."""

import json
import logging
import random
import resource
import shutil
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

import files
from config import ModelConfig, TrainConfig
from data import prepare as preparing
from data.corpus import Corpus
from data.prepare import prepare
from data.pretrained import PretrainedTokenizer, read_directory
from data.tokenizer import ByteTokenizer, byte_level_alphabet, load_tokenizer, train_tokenizer
from runtime.run import Run, describe_run

TEXT = Path(random.__file__).read_text()  # a module of the standard library
PARTS = ["def f(x):", "return", " ", "    ", "\n", "\t\t", "\r\n", "\0", "\x85", "\xa0", "\u200d", "\ufeff", "\ufffd"]
PARTS += ["\u2028", "\U0010ffff", "😀", "漢字", "é", "e\u0301", "⁇", "<0x41>", "9", "_", "A b"]
PARTS += map(chr, range(33, 0x2580, 97))
DRAW = random.Random(0)
STRINGS = ["".join(DRAW.choices(PARTS, k=DRAW.choice([1, 2, 6, 30, 100]))) for _ in range(300)]  # no U+2581
STRINGS += ["", TEXT[:8000], "語" * 3000]
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
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns about directories without a model
    root = tmp_path_factory.mktemp("tokenizers")
    folders = {name: root / name for name in ("llama", "byte-level", "sentencepiece", "bytes", "no-bos", "uni")}
    for folder in folders.values():
        folder.mkdir()
    llama: dict[str, Any] = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    llama |= {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "vocab_size": 500}
    texts = TEXT.splitlines() + ["<s> </s>"] * 99
    other: dict[str, Any] = {"add_dummy_prefix": False, "bos_id": -1, "user_defined_symbols": "<sep>"}
    for name, more in (("llama", {}), ("no-bos", other), ("uni", other | {"model_type": "unigram"})):
        with open(folders[name] / "tokenizer.model", "wb") as model:
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **llama | more)
    write(folders["llama"] / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", eos_token="</s>")
    byte_level_bpe().save(str(folders["byte-level"] / "tokenizer.json"))
    write(folders["byte-level"] / "tokenizer_config.json", eos_token={"__type": "AddedToken", "content": END})
    train_tokenizer([TEXT] + ["<s> </s>\n"] * 99, 500).save(folders["sentencepiece"])
    ByteTokenizer().save(folders["bytes"])
    theirs = AutoTokenizer.from_pretrained(folders["llama"])
    theirs.add_tokens(tokenizers.AddedToken("\u2581t", normalized=False))  # as Gemma's runs of spaces
    theirs.save_pretrained(folders["llama"])
    return folders


def write(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(fields))


def their_ids(theirs, text: str, **options) -> list[int]:
    return theirs(text, add_special_tokens=False, **options)["input_ids"]


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
@pytest.mark.parametrize("model_type", [None, "llama", "qwen3", "normal-llama"])
def test_ours_has_the_same_ids_in_transformers_beside_any_architecture(directories, tmp_path, kind, model_type):
    """AutoTokenizer would take another class for some of them if tokenizer_config.json named none."""
    folder = shutil.copytree(directories[kind], tmp_path / "checkpoint")
    if model_type:
        write(folder / "config.json", model_type=model_type)
    ours, theirs = load_tokenizer(kind, folder), AutoTokenizer.from_pretrained(folder)
    assert (len(theirs), theirs.eos_token_id) == (ours.vocab_size, ours.end_of_document)
    for text in STRINGS[:: 5 if model_type else 1]:
        assert theirs(text)["input_ids"] == ours.encode(text), text
        assert theirs.decode(ours.encode(text)) == text
    for number, piece in enumerate(("<unk>", "<s>", "</s>")):  # where transformers differs from ours
        assert theirs(f"a{piece}b", split_special_tokens=True)["input_ids"] == ours.encode(f"a{piece}b")
        assert kind == "bytes" or number in theirs(f"a{piece}b")["input_ids"]
    assert ours.decode(ours.encode("a\u2581b")) == "a\u2581b"


@pytest.mark.parametrize("name", ["byte-level", "llama", "bytes"])
def test_theirs_has_the_same_ids_and_bytes_here_and_once_saved(directories, tmp_path, name):
    ours, theirs = PretrainedTokenizer(directories[name]), AutoTokenizer.from_pretrained(directories[name])
    assert (ours.vocab_size, ours.end_of_document) == (len(theirs), theirs.eos_token_id)
    space = b" " if name == "llama" else b""
    for text, batched in zip(STRINGS, ours.encode_batch(STRINGS), strict=True):
        ids = ours.encode(text)
        assert ids == batched == their_ids(theirs, text), text
        if text and not (name == "llama" and text[0] == " "):
            assert ours.decode(ids) == text
            assert b"".join(ours.decode_bytes([token]) for token in ids) == space + text.encode()
            assert ours.token_bytes[[*ids, ours.end_of_document]].sum() == len(text.encode())  # bytes of a document
    assert ours.decode_bytes([*ours.encode("a"), ours.end_of_document, ours.vocab_size + 5]) == space + b"a"
    assert their_ids(theirs, theirs.eos_token) == [ours.end_of_document]
    for text in (f"a{theirs.eos_token}b", theirs.eos_token * 2, "<s>", "<unk>", "<pad>"):
        ids = ours.encode(text)
        assert ours.decode(ids) == text and all(ours.token_bytes[ids] > 0), "a special token typed as text is text"
        assert ids == their_ids(theirs, text, split_special_tokens=True)
    ours.save(tmp_path)
    again, in_transformers = PretrainedTokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (again.hash, again.vocab_size, again.end_of_document) == (ours.hash, ours.vocab_size, ours.end_of_document)
    for text in STRINGS[::10]:
        assert again.encode(text) == ours.encode(text) and their_ids(in_transformers, text) == their_ids(theirs, text)


def test_any_directory_gives_its_tokenizer_to_a_new_model(directories, tmp_path):
    for name in ("byte-level", "llama", "bytes", "sentencepiece"):
        folder, saved = (shutil.copytree(directories[name], tmp_path / (name + end)) for end in ("", "-saved"))
        (folder / "chat_template.jinja").write_text("kept")
        read_directory(folder).save(saved)
        assert (saved / "chat_template.jinja").read_text() == "kept" and read_directory(saved).encode("a b")
    assert (no_bos := read_directory(directories["no-bos"])).decode(no_bos.encode("a<sep>b\0")) == "a<sep>b\0"
    write(tmp_path / "config.json", model_type="gpt2", eos_token_id=[502])  # <pad>
    shutil.copy(directories["byte-level"] / "tokenizer.json", tmp_path)
    other = read_directory(tmp_path)
    assert other.end_of_document == 502, "from config.json, of whatever model"
    assert other.hash != read_directory(directories["byte-level"]).hash, "documents end otherwise"
    (tmp_path / "tokenizer.json").unlink()
    shutil.copy(directories["llama"] / "tokenizer.model", tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.model changes text, or has no </s>; AutoTokenizer"):
        read_directory(tmp_path)  # it puts a space in front
    with pytest.raises(ValueError, match=r"uni/tokenizer\.model is a unigram model or was extended: it has other ids"):
        read_directory(directories["uni"])
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"tokenizer\.model: not a readable SentencePiece model$"):
        read_directory(tmp_path)
    with pytest.raises(ValueError, match=r"^byte holds no tokenizer\.json and no tokenizer\.model; AutoTok"):
        read_directory(Path("byte"))


@pytest.mark.parametrize("begins", [True, False])
def test_documents_begin_as_prompts_do_in_transformers_and_a_held_out_tail_does_not(directories, tmp_path, begins):
    shutil.copy(directories["llama"] / "tokenizer.model", tmp_path)
    fields = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<begin>", "add_bos_token": begins}
    write(tmp_path / "tokenizer_config.json", **fields)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    ours, texts = PretrainedTokenizer(tmp_path), [TEXT[:9000], *(f"a note {number}" for number in range(60))]
    assert ours.encode_prompt("once") == theirs("once")["input_ids"] == [500] * begins + ours.encode("once")
    assert (ours.text_vocab_size, ours.vocab_size) == (500 + begins, 501), "no text needs the last one"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepared = prepare([str(tmp_path / "a.jsonl")], "", 0, tmp_path / "cache", 16, ours)
    head, tail = ours.encode_prompt(TEXT[:8100]), ours.encode(TEXT[8100:9000])
    assert (head[0] == 500) == begins and tail[0] != 500
    corpus = Corpus([str(tmp_path / "a.jsonl")], tmp_path)
    for split, first, tokens in (("train", head, prepared.train), ("val", tail, prepared.val)):
        _, *notes = ("".join(chunks) for part, _, chunks in corpus.parts() if part == split)
        ids = [first, *map(ours.encode_prompt, notes)]
        assert tokens.tolist() == [token for one in ids for token in (*one, ours.end_of_document)] and len(notes) > 3


@pytest.mark.parametrize("name", ["byte-level", "llama", "sentencepiece"])
@pytest.mark.parametrize("window", [4000, 60])
def test_a_document_in_windows_has_the_ids_of_the_whole(directories, tmp_path, monkeypatch, name, window):
    """No space is put in front of a window, no merge is lost between two, and no character is cut. It begins as one."""
    assert (preparing.WHOLE, preparing.WINDOW > 10 * preparing.OVERLAP) == (1 << 24, True)
    for constant, size in {"WHOLE": 1000, "WINDOW": window, "OVERLAP": window // 3}.items():
        monkeypatch.setattr(preparing, constant, size)
    ours = read_directory(directories[name])
    monkeypatch.setattr(ours, "prompt_start", [1])
    search = Mock(side_effect=np.intersect1d)
    monkeypatch.setattr(np, "intersect1d", search)
    units = "日本語 😀é地夤", "no line end ", "abc" * 3, "ha ha ", "0,1,2,"
    for text in (TEXT[:30_000], *(unit * 900 for unit in units)):
        (tmp_path / "a.txt").write_text(text)
        prepared = prepare([], "", 0, tmp_path / "cache", 16, ours, [str(tmp_path / "a.txt")])
        ids = prepared.val.tolist()
        if window > 1000:
            assert ids == [1, *ours.encode(text), ours.end_of_document], text[:9]
        else:  # too short for the same tokens
            assert ids[0] == 1 and (ours.decode(ids[1:]) == text or name == "llama")
    # Only the overlap of two windows, in bytes, is searched for where they meet, or long texts take many times as long.
    assert max(len(starts) for call in search.call_args_list for starts in call.args) <= 4 * (window // 3)


DOCUMENTS = ["Plain Text 12", "a  b", " Ünï e\u0301 \ufb01", "x <tag> y", "語😀\n\n", "ends ", "a-b", "plain"]
NORMALIZERS: list[Any] = [None, normalizers.Lowercase(), normalizers.NFC(), normalizers.NFKD(), normalizers.Strip()]
NORMALIZERS += [normalizers.StripAccents(), normalizers.Replace(" ", "_"), normalizers.Prepend("x")]
STEPS: list[Any] = [pre_tokenizers.Digits(), pre_tokenizers.Whitespace(), pre_tokenizers.Split("e", "removed")]


def tokenizer_json(folder: Path, normalizer: Any, step: Any, letters: int = 256, tag: str = "") -> Path:
    """Byte-level BPE without merges, of the first `letters` of the alphabet, perhaps with a token <tag>."""
    alphabet = [piece for piece, number in byte_level_alphabet().items() if number < letters]
    tokenizer = tokenizers.Tokenizer(models.BPE(dict(zip(alphabet, range(256), strict=False)), []))
    tokenizer.decoder, byte_level = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([step, byte_level])
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([END])
    tokenizer.add_tokens([tokenizers.AddedToken("<tag>", **{tag: True})] if tag else [])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", eos_token=END)
    return folder


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=str)
def test_text_that_a_tokenizer_loses_is_measured_and_said(tmp_path, capsys, normalizer):
    cases = DRAW.sample([*product(STEPS, [256, 200, 100], ["", "lstrip", "rstrip"])], 12)
    for number, (step, letters, tag) in enumerate(cases):
        folder, texts = tmp_path / str(number), DRAW.choices(DOCUMENTS, k=3)
        ours, path = read_directory(tokenizer_json(folder, normalizer, step, letters, tag)), folder / "a.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        ids = [ours.encode_prompt(text) for text in texts]
        assert ("the model reads" in capsys.readouterr().err) == ([*map(ours.decode, ids)] != texts)
        text, back = (Counter(b"".join(each)) for each in ([*map(str.encode, texts)], map(ours.decode_bytes, ids)))
        share = 1 - (text & back).total() / max(text.total(), back.total())
        for _ in range(2):  # the second is not encoded
            files.warned.clear()
            data = prepare([], str(folder), 300, tmp_path / "cache", 16, val_names=[str(path)])
            assert data.lost == pytest.approx(share) and (data.lost > 0) == ([*map(ours.decode, ids)] != texts)
            line = f"warning: the tokenizer loses text: {100 * share:.3g}% of the text does not come back"
            assert (line in capsys.readouterr().err) == (share > 0)
        run = describe_run(Run(folder, {}, ModelConfig(), TrainConfig(device="cpu"), data, []), 0)
        assert run["tokenizer"].get("lost", 0) == data.lost


def test_text_that_exceeds_the_limits_of_a_regular_expression_is_a_line(tmp_path):
    step = pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated")
    ours = read_directory(tokenizer_json(tmp_path / "theirs", None, step))
    for encode in (ours.encode_batch, ours.encode_with_starts):
        with pytest.raises(ValueError, match=r"^/.*/theirs/tokenizer\.json: the tokenizers library fails: .*limit.*$"):
            encode(["fox", "x" * 60])


FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
SPECIAL: dict[str, Any] = {"id": 4, "content": "<s>", "special": True}
MERGED = {"vocab": {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}, "merges": ["< s", "<s >"]}


def write_json(folder: Path, added: list[dict], end: str = "<s>", **changes: Any) -> None:
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    fields = {"added_tokens": [FLAGS | token for token in added], "decoder": decoder} | changes
    fields["model"] = {"type": "BPE"} | MERGED | changes.get("model", {})
    write(folder / "tokenizer.json", **fields)
    write(folder / "tokenizer_config.json", eos_token=end)


@pytest.mark.parametrize("added", [[SPECIAL], [SPECIAL | {"special": False}], []])
def test_the_end_is_never_merged_from_its_characters(tmp_path, added):
    """Even if it is no special token, or no added token at all. Truncation and dropout in the file are not applied."""
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    for merges in (MERGED["merges"], [["<", "s"], ["<s", ">"]]):
        write_json(tmp_path, added, model={"merges": merges, "dropout": 1.0}, truncation=truncation)
        ours = PretrainedTokenizer(tmp_path)
        assert ours.end_of_document == 4 and ours.encode("<s>") == [3, 2] and ours.decode([3, 4, 2]) == "<s>"


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
REFUSED: dict[str, dict[str, Any]] = {
    "model.type is 'WordPiece'; only BPE is supported": {"model": {"type": "WordPiece"}},
    "only ByteLevel and ByteFallback are supported": {"decoder": {"type": "WordPiece", "prefix": "#", "cleanup": True}},
    "no end-of-document token: .* '9'": {"end": "9"},
    "'<' is both a special token and an ordinary piece": {"end": "<"},
    "damaged, or not a tokenizer": {"added_tokens": None},
    r"may make a text 1e\+07 times as long": {"normalizer": {"type": "Prepend", "prepend": '"' + "b" * 10**7}},
    r"may make a text 1\.1e\+12 times": {"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 40}},
    "may make a text inf times": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 5000}},
    "6 pieces have ids up to 500,000,000": {"model": {"vocab": MERGED["vocab"] | {"a": 500_000_000}}},  # type: ignore
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_tokenizer_json_that_cannot_be_used_is_refused_in_one_line(tmp_path, monkeypatch, message):
    write_json(tmp_path, [SPECIAL], **REFUSED[message])
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{message}") as error:
        PretrainedTokenizer(tmp_path)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 2 and after.ru_maxrss - before.ru_maxrss < 300_000  # KiB
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"tokenizer.json: needs the package `tokenizers`; run `pip install tok.*`$"):
        PretrainedTokenizer(tmp_path)
