"""Tokenizers of other people's models: the `tokenizer.json` of a Hugging Face directory.

Ids equal those of transformers, except that a special token typed as text is text here, never the special token.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from data.tokenizer import Tokenizer, byte_level_alphabet, load_tokenizer, piece_bytes
from files import read_json, require, write_atomically

JSON, CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
MODEL = "config.json"
PROBE = " a  b\t\ufb01e\u0301\n \U0001f600"  # has what normalization changes, and what few vocabularies hold
COPIED = (JSON, CONFIG, SPECIAL, "added_tokens.json", "chat_template.jinja")


def read_directory(directory: Path) -> Tokenizer:
    """The tokenizer of any directory: Hugging Face's tokenizer.json, or a tokenizer.model of SentencePiece.

    Raises ValueError for one that is missing, damaged or not supported.
    """
    if (directory / JSON).is_file():
        end: Any = read_json(directory / MODEL, dict).get("eos_token_id") if (directory / MODEL).is_file() else None
        return PretrainedTokenizer(directory, end[0] if isinstance(end, list) and end else end)
    path = directory / "tokenizer.model"
    other = f"--tokenizer {directory}: no folder with {JSON} or tokenizer.model; or choose sentencepiece or bytes"
    require(path.is_file(), other)
    tokenizer = load_tokenizer("sentencepiece", directory)
    same = tokenizer.end_of_document in range(3) and tokenizer.decode(tokenizer.encode(PROBE)) == PROBE
    require(same, f"{path} changes text, or has no </s>; AutoTokenizer of transformers makes a {JSON} of it")
    return tokenizer


class PretrainedTokenizer(Tokenizer):
    """The tokenizer of a Hugging Face directory. No text is encoded as a special token or as the end of a document.

    Some models normalize the text, or know no token for a character, so that it does not decode to itself. A space that
    the model puts in front of every text is removed by `decode` and kept by `decode_bytes`, which may be given the
    middle of a text. The hash is the SHA-256 of `tokenizer.json` and the end-of-document id.
    """

    kind = "pretrained"
    _tokenizer: Any

    def __init__(self, directory: Path, end: str | int | None = None):
        """The end of a document is `eos_token` of tokenizer_config.json, or of special_tokens_map.json, or else `end`.

        A ValueError names an unusable file.
        """
        self._files = {name: (directory / name).read_bytes() for name in COPIED if (directory / name).is_file()}
        if JSON not in self._files:
            raise ValueError(f"{directory} holds no {JSON}; AutoTokenizer of transformers makes one from other files")
        for name in (SPECIAL, CONFIG):
            token = read_json(directory / name, dict).get("eos_token") if name in self._files else None
            end = (token.get("content") if isinstance(token, dict) else token) or end
        try:
            self._open(self._files[JSON], end)
        except (AttributeError, KeyError, RecursionError, TypeError):
            raise ValueError(f"{directory / JSON}: damaged, or not a tokenizer") from None
        except ValueError as error:
            raise ValueError(f"{directory / JSON}: {error}") from None
        self.hash = hashlib.sha256(f"{JSON} {self.end_of_document} ".encode() + self._files[JSON]).hexdigest()
        self._space_in_front = self.decode_bytes(self.encode("a")) == b" a"
        self.token_bytes[self.end_of_document] -= self._space_in_front  # the space in front is not text

    def _open(self, content: bytes, end: str | int | None) -> None:
        """A file of the `tokenizers` library, changed so that special tokens typed as text stay text."""
        try:
            import tokenizers
        except ImportError:
            raise ValueError("needs the package `tokenizers`; run `pip install tokenizers`") from None
        fields = json.loads(content)
        model, added, decoder = fields["model"], fields["added_tokens"], json.dumps(fields["decoder"])
        if model["type"] != "BPE":
            raise ValueError(f"model.type is {model['type']!r}; only BPE is supported")
        if "ByteLevel" not in decoder and "ByteFallback" not in decoder:
            raise ValueError(f"decoder is {decoder}; only ByteLevel and ByteFallback are supported")
        vocabulary = model["vocab"] | {token["content"]: token["id"] for token in added}
        self.end_of_document = vocabulary.get(end, end)  # by its name, or its id
        if self.end_of_document not in vocabulary.values():
            source = f"eos_token in {CONFIG}, or else eos_token_id in config.json"
            problem = "are missing" if end is None else f"is {end!r}, which the vocabulary lacks"
            raise ValueError(f"no end-of-document token: {source}, {problem}")
        special = {name for name, token in vocabulary.items() if token == self.end_of_document}
        special |= {token["content"] for token in added if token["special"]}
        for token in added:
            token["special"] = token["content"] in special
        # Otherwise a special token that is also in the vocabulary could be merged from its characters.
        model["merges"] = [merge for merge in model["merges"] if "".join(merge).replace(" ", "") not in special]
        model["dropout"] = None  # it makes ids random
        try:
            tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
        except Exception as error:  # the library raises no other class
            raise ValueError(str(error).partition("\n")[0]) from None
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        start = tokenizer.encode("a")
        self.prompt_start = start.ids[: [*start.special_tokens_mask, 0].index(0)]  # what comes before the text
        alphabet = byte_level_alphabet() if "ByteLevel" in decoder else {}
        self.pieces = pieces = [b""] * (max(vocabulary.values()) + 1)
        for name, number in model["vocab"].items():
            in_alphabet = alphabet.keys() >= set(name)
            pieces[number] = bytes(alphabet[char] for char in name) if in_alphabet else piece_bytes(name)
        for token in added:
            pieces[token["id"]] = token["content"].encode()
        texts = [number for name, number in vocabulary.items() if name not in special]
        self.text_vocab_size = 1 + max([*texts, self.end_of_document, *self.prompt_start])
        for name in special:
            pieces[vocabulary[name]] = b""
            piece = vocabulary[name] in self.encode(name) or (len(name) == 1 and name in model["vocab"])
            if piece and name != model.get("unk_token"):
                raise ValueError(f"{name!r} is both a special token and an ordinary piece of text")

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_with_starts(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        found = []
        for text, one in zip(texts, self._tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            sizes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)  # UTF-8 bytes of each character
            starts, ends = np.array(one.offsets).T
            starts[1:][starts[1:] < ends[:-1]] = 0  # tokens that begin inside a character count with those before
            starts = np.maximum.accumulate(starts)
            found.append((np.array(one.ids), (np.cumsum(sizes) - sizes)[starts]))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        text = super().decode(ids)
        return text.removeprefix(" ") if self._space_in_front else text

    def save(self, directory: Path) -> None:
        """Write the original files."""
        for name, content in self._files.items():
            write_atomically(directory / name, content)
