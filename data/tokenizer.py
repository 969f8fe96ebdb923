"""Lossless tokenizers: SentencePiece BPE with byte fallback, or raw bytes."""

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from data.pieces import SPACE, byte_level_alphabet, sentencepiece_bytes, utf8
from data.pretrained import PretrainedTokenizer, load_pretrained_tokenizer

SAMPLE_BYTES = 8_000_000  # upper bound on the text a tokenizer is trained on
SAMPLE_CHARS = 4096  # per sampled block
MAX_MODEL_BYTES = 256 << 20  # of a SentencePiece model
ENCODE_CHARS = 16384  # per call of SentencePiece, whose memory for merges grows with the length of its input

# For transformers, whose ids equal ours but for two kinds of text: to it U+2581 is a space, and a reserved piece typed
# as text is that piece, unless split_special_tokens=True.
SENTENCEPIECE_CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "add_prefix_space": False,
    "add_bos_token": False,
    "add_eos_token": False,
    "legacy": False,
    "clean_up_tokenization_spaces": False,
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
}
BYTES_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "eos_token": "</s>",
}


class ByteTokenizer:
    """One token per byte value, and an end-of-document token."""

    kind = "bytes"
    vocab_size = 257
    end_of_document = 256
    token_bytes = np.array([1] * 256 + [0])
    hash = hashlib.sha256(b"256 bytes, end of document").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises ValueError for a lone surrogate, which UTF-8 cannot encode."""
        return list(utf8(text))

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text to continue."""
        return self.encode(text)

    def encode_array(self, text: str, dtype: np.dtype) -> np.ndarray:
        """`encode` as an array."""
        return np.frombuffer(utf8(text), np.uint8).astype(dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """UTF-8, possibly cut inside a character. The end-of-document token adds nothing."""
        return bytes(token for token in ids if token != self.end_of_document)

    def save(self, directory: Path) -> None:
        """Write the files from which transformers makes a tokenizer with the same ids. Loading needs none of them."""
        _write(directory / "tokenizer.json", _json(_byte_level_bpe()))
        _write(directory / "tokenizer_config.json", _json(BYTES_CONFIG))


class SentencePieceTokenizer:
    """A SentencePiece model with byte fallback. Ids are in LLaMA's order: <unk>, <s>, </s>, 256 bytes, pieces.

    decode(encode(text)) == text for all text that UTF-8 can encode. No text is encoded as one of the first three ids.

    token_bytes: UTF-8 bytes of each id, 0 for the first three. Summed over encode(text): the UTF-8 size of the text.
    hash: SHA-256 of the model, in hex.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, threads: int = -1):
        """`threads` encode a long text; -1 means one per CPU."""
        self.model = model
        self.hash = hashlib.sha256(model).hexdigest()
        self._processor = sentencepiece.SentencePieceProcessor(num_threads=threads)
        self._processor.LoadFromSerializedProto(model)
        self.vocab_size = self._processor.vocab_size()
        self.end_of_document = self._processor.eos_id()
        if self.end_of_document < 0:
            raise ValueError("the SentencePiece model has no piece that ends a document")
        self._bytes = sentencepiece_bytes(self._processor)
        self.token_bytes = np.array([len(data) for data in self._bytes])
        self._u2581_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises ValueError for a lone surrogate, which UTF-8 cannot encode."""
        utf8(text)
        ids: list[int] = []
        # SentencePiece would decode U+2581 as a space, so that character is encoded here, as its three byte tokens.
        for number, part in enumerate(text.split(SPACE)):
            if number:
                ids += self._u2581_ids
            for block_ids in self._processor.encode(list(_blocks(part, ENCODE_CHARS))):
                ids += block_ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text to continue."""
        return self.encode(text)

    def encode_array(self, text: str, dtype: np.dtype) -> np.ndarray:
        """`encode` as an array."""
        return np.array(self.encode(text), dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """UTF-8, possibly cut inside a character. The end-of-document token adds nothing."""
        return b"".join([self._bytes[token] for token in ids])

    def save(self, directory: Path) -> None:
        """Write `tokenizer.model`, a standard SentencePiece model file, and what transformers needs to know of it."""
        _write(directory / "tokenizer.model", self.model)
        _write(directory / "tokenizer_config.json", _json(SENTENCEPIECE_CONFIG))


Tokenizer = ByteTokenizer | SentencePieceTokenizer | PretrainedTokenizer


def _byte_level_bpe() -> dict[str, Any]:
    """The byte tokenizer in the format of the `tokenizers` library: byte-level BPE without merges."""
    end = {"id": ByteTokenizer.end_of_document, "content": BYTES_CONFIG["eos_token"], "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_level_alphabet() | {end["content"]: end["id"]}, "merges": []},
    }


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, indent=1).encode()


def _write(path: Path, content: bytes) -> None:
    """Write a file that is complete as soon as it exists."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def load_tokenizer(kind: str, directory: Path) -> Tokenizer:
    """Load the tokenizer saved in `directory`. Raises ValueError if it is missing or damaged."""
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    if kind == PretrainedTokenizer.kind:
        return load_pretrained_tokenizer(directory)
    path = directory / "tokenizer.model"
    try:
        if not path.is_file() or path.stat().st_size > MAX_MODEL_BYTES:
            raise ValueError
        return SentencePieceTokenizer(path.read_bytes())
    except (OSError, RuntimeError, ValueError):
        raise ValueError(f"{path}: not a readable SentencePiece model") from None


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Train SentencePiece BPE on at most 8 MB sampled evenly from `texts`. The same text gives the same tokenizer.

    Raises ValueError if `vocab_size` is too large for this text, or too small for its characters.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(_sample(texts)),
            model_writer=model,
            model_type="bpe",
            vocab_size=max(vocab_size, 3),  # below 3 it fails before it reports the minimum
            byte_fallback=True,
            character_coverage=0.9999,  # rarer characters are encoded as bytes
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            required_chars="\n",
            user_defined_symbols=["\t"],  # the trainer reserves tabs for itself and never learns a piece with one
            # No piece crosses a space or mixes letters with punctuation. Pieces like `    self.` and ` of the` would
            # give 10% fewer tokens but 10% more bits per byte: the same word would be segmented in many ways.
            split_by_whitespace=True,
            split_by_unicode_script=True,
            allow_whitespace_only_pieces=True,  # indentation
            max_sentence_length=1 << 20,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _vocabulary_error(str(error), vocab_size) from None
    return SentencePieceTokenizer(model.getvalue())


def _vocabulary_error(message: str, vocab_size: int) -> ValueError:
    if largest := re.search(r"too high .* <= (\d+)", message):
        return ValueError(f"--vocab-size {vocab_size} is too large for this text; use at most {largest[1]}")
    if smallest := re.search(r"smaller than required_chars.* vs (\d+)", message):
        return ValueError(f"--vocab-size {vocab_size} cannot hold every byte and character; use at least {smallest[1]}")
    # Text of line ends or NUL characters alone, which it never makes a piece of.
    return ValueError(f"SentencePiece learns nothing from this text ({message.strip()}); use --tokenizer bytes")


def _sample(texts: Iterable[str]) -> list[str]:
    """Every n-th block of the text, with n a power of 2 that leaves 4 to 8 MB; all of it if there is less."""
    kept: list[str] = []
    size, stride, number = 0, 1, 0
    for text in texts:
        for block in _blocks(text, SAMPLE_CHARS):
            if number % stride == 0:
                kept.append(block)
                size += len(block.encode())
            number += 1
            if size > SAMPLE_BYTES:
                kept, stride = kept[::2], stride * 2
                size = sum(len(block.encode()) for block in kept)
    return kept


def _blocks(text: str, max_chars: int) -> Iterator[str]:
    """`text` in blocks of at most `max_chars` characters, cut at line ends where possible."""
    start = 0
    while len(text) - start > max_chars:
        end = text.rfind("\n", start, start + max_chars) + 1 or start + max_chars
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
