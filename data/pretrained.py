"""Tokenizers of other people's models: the `tokenizer.json` of a Hugging Face directory.

Ids equal those of transformers, except that a special token typed as text is text here, never the special token.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from data.tokenizer import Tokenizer, byte_level_alphabet, load_tokenizer, piece_bytes
from files import Json, one_line, read_json, require, warn

JSON, TOKENIZER_CONFIG, PIECES = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
# Where the end of a document may be named, as a token or an id. The first that names one counts.
ENDS = {TOKENIZER_CONFIG: "eos_token", "special_tokens_map.json": "eos_token"}
ENDS |= {"config.json": "eos_token_id", "generation_config.json": "eos_token_id"}
TABLES = (TOKENIZER_CONFIG, "vocab.json", "added_tokens.json")  # of pieces and their ids
COPIED = (JSON, PIECES, *TABLES, "special_tokens_map.json", "merges.txt", "chat_template.jinja")
PROBE = " a  b\t\ufb01e\u0301\n \U0001f600"  # has what normalization changes, and what few vocabularies hold
# What may make a text longer: texts that are put into it, and ByteLevel, which counts as two characters.
PUT_IN = r'(?:"(?:content|prepend|continuing_subword_prefix|end_of_word_suffix)": "|ByteLev)([^"\\]*(?:\\.[^"\\]*)*)"'


def read_directory(directory: Path) -> Tokenizer:
    """The tokenizer of any directory: Hugging Face's tokenizer.json, or a tokenizer.model of SentencePiece."""
    if (directory / JSON).is_file():
        return PretrainedTokenizer(directory)
    path = directory / PIECES
    other = "AutoTokenizer of transformers makes one of other files; --tokenizer takes sentencepiece and bytes, too"
    require(path.is_file(), f"{directory} holds no {JSON} and no {PIECES}; {other}")
    tokenizer: Any = load_tokenizer("sentencepiece", directory)
    same = tokenizer.end_of_document >= 0 and tokenizer.decode(tokenizer.encode(PROBE)) == PROBE
    require(same, f"{path} changes text, or has no </s>; AutoTokenizer of transformers makes a {JSON} of it")
    ranked = tokenizer.scores == sorted(map(int, tokenizer.scores), reverse=True)  # as BPE numbers its merges
    require(ranked, f"{path} is a unigram model or was extended: it has other ids in transformers; use BPE as trained")
    tokenizer.files = read_files(directory) | tokenizer.files
    return tokenizer


def read_files(directory: Path, vocabulary: dict[str, int] | None = None) -> dict[str, bytes]:
    """All files of a tokenizer. A line names one that differs from `vocabulary`, or else from tokenizer.model."""
    files = {name: (directory / name).read_bytes() for name in COPIED if (directory / name).is_file()}
    with suppress(AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # a damaged file
        ids = {name: json.loads(files.get(name, b"{}")) for name in TABLES}
        added = ids[TOKENIZER_CONFIG].get("added_tokens_decoder", {})
        ids[TOKENIZER_CONFIG] = {token["content"]: int(number) for number, token in added.items()}
        if PIECES in files:
            model = sentencepiece.SentencePieceProcessor(model_proto=files[PIECES])
            ids[PIECES] = {model.id_to_piece(number): number for number in range(len(model))}
        for name, found in ids.items():
            different = found.items() - (vocabulary or ids[PIECES]).items()
            for piece, number in [*different][:1]:
                warn(one_line(f"{directory / name} differs from the tokenizer in use: {piece!r} is {number} there"))
    return files


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Make an error of the `tokenizers` library a ValueError that names its file. Rust may print lines of its own."""
    try:
        yield
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        problem = error if isinstance(error, ValueError) else "damaged, or not a tokenizer"
        raise ValueError(f"{path}: {problem}") from None
    except BaseException as error:
        # The library raises Exception itself, and panics with a class that has no public name.
        if type(error).__name__ not in ("Exception", "PanicException"):
            raise
        raise ValueError(one_line(f"{path}: the tokenizers library fails: {error}")) from None


def _end_of_document(directory: Path) -> str | int | None:
    """The token that ends a document, or its id, from the first file that names one."""
    for name, key in ENDS.items():
        match read_json(directory / name, dict).get(key) if (directory / name).is_file() else None:
            case {"content": token} | [token, *_] | (str() | int() as token):
                return token
    return None


class PretrainedTokenizer(Tokenizer):
    """The tokenizer of a Hugging Face directory. No text is encoded as a special token or as the end of a document.

    Some models normalize the text, or know no token for a character, so that it does not decode to itself. The hash is
    the SHA-256 of `tokenizer.json` and the end-of-document id. A ValueError names an unusable file.
    """

    kind = "pretrained"
    _tokenizer: Any

    def __init__(self, directory: Path):
        self._path = path = directory / JSON
        fields, end = read_json(path, dict), _end_of_document(directory)
        with _errors(path):
            self._open(fields, end)
        self.files = read_files(directory, self._tokenizer.get_vocab())
        self.hash = hashlib.sha256(f"{JSON} {self.end_of_document} ".encode() + self.files[JSON]).hexdigest()
        self.space_in_front = self.decode_bytes(self.encode("a")) == b" a"
        self.token_bytes[self.end_of_document] -= self.space_in_front  # the space in front is not text

    def _open(self, fields: Json, end: str | int | None) -> None:
        """A file of the `tokenizers` library, changed so that special tokens typed as text stay text."""
        try:
            import tokenizers
        except ImportError:
            raise ValueError("needs the package `tokenizers`; run `pip install tokenizers`") from None
        model, decoder = fields["model"], json.dumps(fields["decoder"])
        require(model["type"] == "BPE", f"model.type is {model['type']!r}; only BPE is supported")
        require("Byte" in decoder, f"decoder is {decoder}; only ByteLevel and ByteFallback are supported")
        steps = [fields.get("normalizer"), fields.get("pre_tokenizer"), model | {"vocab": 0, "merges": 0}]
        put_in = re.findall(PUT_IN, json.dumps(steps, ensure_ascii=False))
        growth = math.prod(float(len(text) or 1) for text in put_in)
        require(growth <= 8, f"it may make a text {growth:.3g} times as long; up to 8 times is supported")
        added = {token["content"]: token["id"] for token in fields["added_tokens"]}
        ends = [name for name, number in (model["vocab"] | added).items() if end in (name, number)]
        source = f"eos_token in {TOKENIZER_CONFIG}, or else eos_token_id in config.json"
        require(ends, f"no end-of-document token: {source}, is {end!r}, which the vocabulary lacks")
        special = {ends[0]} | {token["content"] for token in fields["added_tokens"] if token["special"]}
        for token in fields["added_tokens"]:
            token["special"] = token["content"] in special
        # Otherwise a special token that is also in the vocabulary could be merged from its characters.
        model["merges"] = [merge for merge in model["merges"] if "".join(merge).replace(" ", "") not in special]
        model["dropout"] = None  # it makes ids random
        self._tokenizer = tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = tokenizer.get_vocab()  # the library may give added tokens other ids
        require(max(ids.values()) < 2 * len(ids) + 1000, f"{len(ids):,} pieces have ids up to {max(ids.values()):,}")
        self.end_of_document = ids[ends[0]]
        start = tokenizer.encode("a")
        self.prompt_start = start.ids[: [*start.special_tokens_mask, 0].index(0)]  # what comes before the text
        alphabet = byte_level_alphabet() if "ByteLevel" in decoder else {}
        self.pieces = [b""] * (1 + max(ids.values()))
        for name in ids.keys() - special:
            # A byte-level decoder leaves added tokens as they are. Others decode them too, such as Gemma's spaces.
            if name in added and alphabet:
                piece = name.encode()
            elif alphabet.keys() >= set(name):
                piece = bytes(alphabet[char] for char in name)
            else:
                piece = piece_bytes(name)
            self.pieces[ids[name]] = piece
        texts = [ids[name] for name in ids.keys() - special]
        self.text_vocab_size = 1 + max([*texts, self.end_of_document, *self.prompt_start])
        for name in special - {model.get("unk_token")}:
            ordinary = ids.get(name) in tokenizer.encode(name, add_special_tokens=False).ids
            require(not ordinary, f"{name!r} is both a special token and an ordinary piece of text")

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        with _errors(self._path):
            return [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_with_starts(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        found = []
        with _errors(self._path):
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, one in zip(texts, encoded, strict=True):
            data = np.frombuffer(text.encode(), np.uint8)
            characters = np.flatnonzero(data & 0xC0 != 0x80)  # the byte where each begins
            starts, ends = np.array(one.offsets, np.int64).reshape(-1, 2).T
            starts[1:][starts[1:] < ends[:-1]] = 0  # tokens that begin inside a character count with those before
            starts = np.maximum.accumulate(starts)
            found.append((np.array(one.ids, np.int64), characters[starts]))
        return found
