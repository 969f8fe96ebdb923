"""Tokenizers of other people's models, from a Hugging Face directory: `tokenizer.json` or `tokenizer.model`.

The first is read if there are both, as transformers does. Ids equal those of transformers, but for these texts:

- A special token typed as text is text here, never the special token. An added token that is not special is an
  ordinary piece to both.
- With a `tokenizer.model` that puts a space in front, transformers puts none in front of a text that begins with one.
  SentencePiece does, and so do we. We also apply the model's normalization, which LlamaTokenizer of transformers skips.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from data.pieces import SPACE, byte_level_alphabet, sentencepiece_bytes, utf8

JSON, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
COPIED = (JSON, SENTENCEPIECE, CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
MAX_FILE_BYTES = 256 << 20
MAX_IDS = 1 << 22

AddedToken = tuple[int, str, bool]  # its id, its text, and whether it is special


class PretrainedTokenizer:
    """The tokenizer of a Hugging Face directory. No text is encoded as a special token or as the end of a document.

    Whether decode(encode(text)) == text is up to the model: some normalize the text, or know no token for a character.
    `encode` adds no token for the beginning of a text, `encode_prompt` does. A space that the model puts in front of
    every text is removed by `decode` and kept by `decode_bytes`, which may be given the middle of a text.

    token_bytes: UTF-8 bytes that each id adds to a decoded text, 0 for special tokens and the unknown token. So bits
    per byte counts the bytes of the text that the tokenizer gives back, and one more per document if it puts a space
    in front. Text of a document beyond 1 MiB is encoded separately, so no piece crosses that boundary.
    hash: SHA-256 of the model file and the end-of-document id, in hex.
    """

    kind = "pretrained"

    def __init__(
        self,
        file: str,
        model: bytes,
        end: int | str | None,
        added: Sequence[AddedToken] = (),
        copied: dict[str, bytes] | None = None,
        begins: bool = False,
    ):
        """`model` is the content of `file`, which is `tokenizer.json` or `tokenizer.model`.

        `end` is the token that ends a document, or its id; None is what a SentencePiece model itself says. `added` are
        tokens added to a SentencePiece model, and `begins` says whether its beginning-of-text token starts a prompt;
        a `tokenizer.json` says both itself. `copied` are the other files that `save` writes.

        Raises ValueError for a model that is damaged or not supported.
        """
        self.file, self.model, self.added, self._copied = file, model, added, copied or {}
        self._encoder = _Json(model, end) if file == JSON else _SentencePiece(model, end, added, begins)
        self.end_of_document = self._encoder.end
        self.vocab_size = len(self._encoder.pieces)
        self.token_bytes = np.array([len(piece) for piece in self._encoder.pieces])
        self.hash = hashlib.sha256(f"{file} {self.end_of_document} ".encode() + model).hexdigest()
        self._space_in_front = self.decode_bytes(self.encode("a")) == b" a"

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises ValueError for a lone surrogate, which UTF-8 cannot encode."""
        utf8(text)
        return self._encoder.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text to continue, after the tokens that the model expects at the beginning, if any."""
        return [*self._encoder.begin, *self.encode(text)]

    def encode_array(self, text: str, dtype: np.dtype) -> np.ndarray:
        """`encode` as an array."""
        return np.array(self.encode(text), dtype)

    def decode(self, ids: Iterable[int]) -> str:
        text = self.decode_bytes(ids).decode(errors="replace")
        return text.removeprefix(" ") if self._space_in_front else text

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """UTF-8, possibly cut inside a character. Special tokens add nothing, and neither do ids past the vocabulary,
        which models have whose vocabulary is padded."""
        pieces = self._encoder.pieces
        return b"".join([pieces[token] for token in ids if token < len(pieces)])

    def save(self, directory: Path) -> None:
        """Write the original files, and `generation_config.json` if they do not say what ends a document."""
        for name, content in {**self._copied, self.file: self.model}.items():
            part = directory / f"{name}.part"
            part.write_bytes(content)
            part.replace(directory / name)


def load_pretrained_tokenizer(directory: Path) -> PretrainedTokenizer:
    """The tokenizer in a Hugging Face directory.

    The end of a document is `eos_token` of tokenizer_config.json, `eos_token_id` of generation_config.json or of
    config.json, or that of the SentencePiece model. Raises ValueError, naming the file, if there is none, or if a file
    is missing, damaged, or not supported.
    """
    copied = {name: _read(directory / name) for name in COPIED if (directory / name).is_file()}
    file = next((name for name in (JSON, SENTENCEPIECE) if name in copied), None)
    if file is None:
        raise ValueError(f"{directory} holds no tokenizer: neither {JSON} nor {SENTENCEPIECE}")
    settings = _read_fields(directory / CONFIG)
    end: int | str | None = _content(settings.get("eos_token"))
    if end is None:
        for name in (GENERATION, "config.json"):
            ids = _read_fields(directory / name).get("eos_token_id")
            end = next(iter(ids), None) if isinstance(ids, list) else ids
            if end is not None:
                copied[GENERATION] = json.dumps({"eos_token_id": end}).encode()
                break
    try:
        added = [] if file == JSON else list(_added_tokens(copied))
        begins = settings.get("add_bos_token") is not False  # LLaMA's tokenizers do so unless told otherwise
        return PretrainedTokenizer(file, copied.pop(file), end, added, copied, begins)
    except ValueError as error:
        raise ValueError(f"{directory / file}: {error}") from None


def _read(path: Path) -> bytes:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, which no tokenizer needs")
    return path.read_bytes()


def _read_fields(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; none if it is missing."""
    return _fields(path, _read(path)) if path.is_file() else {}


def _fields(path: Path | str, content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is damaged: not a JSON object")
    return fields


def _content(token: Any) -> str | None:
    """The text of a token, which files write as a string or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _check_end(end: int | str | None, vocabulary: dict[str, int]) -> int:
    """The id of the token that ends a document. Raises ValueError if there is none."""
    if end is None:
        raise ValueError(f"no token ends a document; name it as eos_token in {CONFIG}")
    found = vocabulary.get(end) if isinstance(end, str) else end
    if type(found) is not int or found not in vocabulary.values():
        raise ValueError(f"the vocabulary lacks the token that ends a document, {end!r}")
    return found


def _ambiguous(name: str) -> ValueError:
    return ValueError(f"{name!r} is both a special token and an ordinary piece of text")


class _SentencePiece:
    """Encodes as SentencePiece does, after which control pieces never stand for text.

    pieces: the UTF-8 bytes of each id. begin: the ids before a prompt. end: the id that ends a document.
    """

    def __init__(self, model: bytes, end: int | str | None, added: Sequence[AddedToken], begins: bool):
        self._processor = sentencepiece.SentencePieceProcessor(num_threads=1)
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError:
            raise ValueError("not a readable SentencePiece model") from None
        self.begin = [self._processor.bos_id()] if begins and self._processor.bos_id() >= 0 else []
        self.pieces = sentencepiece_bytes(self._processor)
        vocabulary = {self._processor.id_to_piece(token): token for token in range(len(self.pieces))}
        size = len(self.pieces)
        for token, content, special in added:
            if not 0 <= token < MAX_IDS or vocabulary.setdefault(content, token) != token:
                raise ValueError(f"the id of the added token {content!r} is {token}, which contradicts the vocabulary")
            self.pieces += [b""] * (token + 1 - len(self.pieces))
            if special or token >= size:
                self.pieces[token] = b"" if special else content.encode()
        if end is None and self._processor.eos_id() >= 0:
            end = self._processor.eos_id()
        self.end = _check_end(end, vocabulary)
        self.pieces[self.end] = b""
        for token in {token for token, _, special in added if special} | {self.end}:
            if token < size and not (self._processor.is_control(token) or self._processor.is_unknown(token)):
                raise _ambiguous(self._processor.id_to_piece(token))

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)


def _added_tokens(files: dict[str, bytes]) -> Iterator[AddedToken]:
    """The tokens added to a SentencePiece model. Those of added_tokens.json, an older file, count as special."""
    added = _fields("added_tokens.json", files.get("added_tokens.json", b"{}"))
    decoder = _fields(CONFIG, files.get(CONFIG, b"{}")).get("added_tokens_decoder") or {}
    try:
        for token, fields in decoder.items():
            yield int(token), str(fields["content"]), bool(fields.get("special"))
        for content, token in added.items():
            if str(token) not in decoder:
                yield int(token), str(content), True
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError("the added tokens in added_tokens.json or tokenizer_config.json are damaged") from None


class _Json:
    """Encodes as the `tokenizers` library does, with special tokens typed as text encoded as text.

    pieces: the UTF-8 bytes of each id. begin: the ids before a prompt. end: the id that ends a document.
    """

    def __init__(self, content: bytes, end: int | str | None):
        try:
            import tokenizers
        except ImportError:
            raise ValueError("needs the package `tokenizers`; run `pip install tokenizers`") from None
        fields = _fields(JSON, content)
        try:
            vocabulary, added = _vocabulary(fields)
            self.end = _check_end(end, vocabulary)
            special = {name for name, token in vocabulary.items() if token == self.end}
            special |= {token["content"] for token in added if token["special"]}
            for token in added:
                token["special"] = token["content"] in special
            model = fields["model"]
            # Otherwise a special token that is also in the vocabulary could be merged from its characters.
            model["merges"] = [merge for merge in model["merges"] if "".join(_pair(merge)) not in special]
            _check_normalizer(fields.get("normalizer") or {})
            with _no_panic():
                self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
            names = _decoder_types(fields)
        except (AttributeError, KeyError, TypeError):
            raise ValueError("damaged: not a tokenizer of the `tokenizers` library") from None
        except Exception as error:  # the library raises no other kind for a damaged file
            raise ValueError(str(error).partition("\n")[0]) from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        with _no_panic():
            around = self._tokenizer.encode("", add_special_tokens=True).ids  # [begin], [begin, end], or nothing
        self.begin = [token for token in around[:1] if token != self.end or self.end in around[1:]]
        if any(self._tokenizer.token_to_id(name) != token for name, token in vocabulary.items()):
            raise ValueError("damaged: ids of added_tokens contradict the vocabulary")
        self.pieces = [b""] * (max(vocabulary.values()) + 1)
        for name, number in vocabulary.items():
            self.pieces[number] = _piece_bytes(name, names)
        for token in added:
            self.pieces[token["id"]] = token["content"].encode()
        for name in special:
            self.pieces[vocabulary[name]] = b""
        for name in special - {model.get("unk_token")}:
            if vocabulary[name] in self.encode(name) or (len(name) == 1 and name in model["vocab"]):
                raise _ambiguous(name)

    def encode(self, text: str) -> list[int]:
        with _no_panic():
            return self._tokenizer.encode(text, add_special_tokens=False).ids


@contextmanager
def _no_panic() -> Iterator[None]:
    """Turn a panic in the Rust code of `tokenizers`, whose class cannot be imported, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError("damaged: the `tokenizers` library fails with it") from None


def _vocabulary(fields: dict[str, Any]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The id of every token, and the added tokens. Raises ValueError for what is not supported."""
    if (kind := fields["model"].get("type")) != "BPE":
        raise ValueError(f"model.type is {kind!r}; only BPE is supported")
    added = fields.get("added_tokens") or []
    vocabulary = fields["model"]["vocab"] | {token["content"]: token["id"] for token in added}
    for name, token in vocabulary.items():
        if type(token) is not int or not 0 <= token < MAX_IDS:
            raise ValueError(f"the id of {name!r} is {token!r}, not a number from 0 to {MAX_IDS - 1}")
    return vocabulary, added


def _check_normalizer(normalizer: dict[str, Any]) -> None:
    """Raise ValueError if a table of characters says it is larger than it is: the library would allocate that much."""
    for part in normalizer.get("normalizers") or []:
        _check_normalizer(part)
    if normalizer.get("type") == "Precompiled":
        table = base64.b64decode(normalizer["precompiled_charsmap"] or "")
        if int.from_bytes(table[:4], "little") > len(table) - 4:
            raise ValueError("damaged: precompiled_charsmap of the normalizer")


def _pair(merge: str | list[str]) -> list[str]:
    """The two pieces of a merge, which older files write as one string."""
    return merge.split(" ") if isinstance(merge, str) else merge


def _decoder_types(fields: dict[str, Any]) -> set[str]:
    decoder = fields.get("decoder") or {"type": "missing"}
    parts = decoder.get("decoders", [decoder])
    types = {part["type"] for part in parts}
    if unknown := types - {"ByteLevel", "Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        raise ValueError(f"decoder is {', '.join(sorted(unknown))}; only ByteLevel and SentencePiece's are supported")
    for part in parts:
        if part["type"] == "Replace" and (part["pattern"], part["content"]) != ({"String": SPACE}, " "):
            raise ValueError(f"decoder replaces {part['pattern']}; only {SPACE} by a space is supported")
    return types


ALPHABET = byte_level_alphabet()


def _piece_bytes(piece: str, decoders: set[str]) -> bytes:
    """The bytes behind a piece of a `tokenizer.json` with these decoders."""
    if "ByteLevel" in decoders:
        return bytes(ALPHABET[char] for char in piece) if ALPHABET.keys() >= set(piece) else piece.encode()
    if "ByteFallback" in decoders and re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[1:-1], 16)])
    return piece.replace(SPACE, " ").encode()
