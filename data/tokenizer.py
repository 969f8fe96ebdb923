"""Lossless tokenizers: SentencePiece BPE with byte fallback, or raw bytes."""

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from files import Json, require, warn, write_atomically

SPACE = "\u2581"  # how SentencePiece writes a space
SAMPLE_BYTES = 8_000_000  # upper bound on the text a tokenizer is trained on
SAMPLE_CHARS = 4096  # per sampled block
ENCODE_CHARS = 16384  # per call of SentencePiece, whose memory for merges grows with the length of its input

# For transformers, whose ids equal ours except for two kinds of text: it takes U+2581 as a space, and a reserved piece
# typed as text as that piece, unless split_special_tokens=True.
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
BYTE_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "eos_token": "</s>"}
Ids = Sequence[int] | np.ndarray


class Tokenizer:
    """Text to ids and back.

    pieces: the UTF-8 bytes that each id adds to a decoded text; none for special tokens.
    token_bytes: their lengths. Summed over the ids of a text that decodes to itself: its size in UTF-8.
    end_of_document: the id after each document. No text is encoded as it.
    ends: the ids that end a sample: the end of a document and, if it came with a model, all that the model names.
    space_in_front: whether each text begins with a space that is not its own, which only `decode` removes.
    files: what `save` writes: a directory from which transformers makes a tokenizer with the same ids, if it can.
    token_ids, generation: special tokens in that model's config.json, and its generation_config.json, to be kept.
    hash: in hex, different for tokenizers that encode differently.
    """

    kind: str
    hash: str
    end_of_document: int
    pieces: Sequence[bytes]
    prompt_start: Sequence[int] = ()
    space_in_front = False
    files: dict[str, bytes]
    token_ids: Json | None = None
    generation: Json | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @cached_property
    def ends(self) -> set[int]:
        return {self.end_of_document}

    @cached_property
    def text_vocab_size(self) -> int:
        """How many ids a model needs for all texts: special tokens that no text has may lie beyond."""
        return self.vocab_size

    @cached_property
    def token_bytes(self) -> np.ndarray:
        return np.array([len(piece) for piece in self.pieces])

    def encode_batch(self, texts: list[str]) -> Sequence[Ids]:
        """The ids of each text, computed on all CPUs."""
        raise NotImplementedError

    def encode_with_starts(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The ids of each text, and the byte of the text at which each of them begins."""
        encoded = (np.array(ids, np.int64) for ids in self.encode_batch(texts))
        return [(ids, np.cumsum(self.token_bytes[ids]) - self.token_bytes[ids]) for ids in encoded]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises UnicodeEncodeError, a ValueError, for a lone surrogate."""
        text.encode()
        return np.asarray(self.encode_batch([text])[0]).tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text to continue, after the tokens that the model expects at the beginning, if any."""
        ids = self.encode(text)
        if (read := self.decode(ids)) != text:
            warn(f"warning: the tokenizer loses text: the model reads {read[-80:]!r}")
        return [*self.prompt_start, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace").removeprefix(" " * self.space_in_front)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """UTF-8, possibly cut inside a character. Ids past the vocabulary, which padded models have, add nothing."""
        return b"".join([self.pieces[token] for token in ids if token < len(self.pieces)])

    def save(self, directory: Path) -> None:
        for name, content in self.files.items():
            write_atomically(directory / name, content)


class ByteTokenizer(Tokenizer):
    """One token per byte value, and an end-of-document token. In files it is byte-level BPE without merges."""

    kind = "bytes"
    end_of_document = 256
    pieces = (*(bytes([byte]) for byte in range(256)), b"")
    hash = hashlib.sha256(b"256 bytes, end of document").hexdigest()

    def __init__(self):
        end = {"id": self.end_of_document, "content": BYTE_CONFIG["eos_token"], "special": True}
        end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        fields = {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": byte_level_alphabet() | {end["content"]: end["id"]}, "merges": []},
        }
        self.files = {"tokenizer.json": _json(fields), "tokenizer_config.json": _json(BYTE_CONFIG)}

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with byte fallback. Ids are in LLaMA's order: <unk>, <s>, </s>, 256 bytes, pieces.

    decode(encode(text)) == text for all text that UTF-8 can encode. No text is encoded as one of the first three ids.
    The hash is the SHA-256 of the model. In BPE, `scores` are minus the ranks of the merges.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        self.files = {"tokenizer.model": model, "tokenizer_config.json": _json(SENTENCEPIECE_CONFIG)}
        self.hash = hashlib.sha256(model).hexdigest()
        self._processor = processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(model)
        names = map(processor.id_to_piece, range(len(processor)))
        self.scores = [*map(processor.get_score, range(len(processor)))]
        self.pieces = [b"" if processor.is_control(token) else piece_bytes(name) for token, name in enumerate(names)]
        self.pieces[processor.unk_id()] = b""
        self.end_of_document = processor.eos_id()
        self._u2581_ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        blocks = [
            (number, block)
            for number, text in enumerate(texts)
            for part in re.split(f"({SPACE})", text)
            for block in _blocks(part, ENCODE_CHARS)
        ]
        ids: list[list[int]] = [[] for _ in texts]
        encoded = self._processor.encode([block for _, block in blocks], num_threads=-1)  # on all CPUs
        for (number, block), tokens in zip(blocks, encoded, strict=True):
            # SentencePiece would decode U+2581 as a space, so that character is encoded as its three byte tokens.
            ids[number] += self._u2581_ids if block == SPACE else tokens
        return ids


class NoTokenizer(Tokenizer):
    """Only a number of ids: for token files whose tokenizer is not known, with which there is no text."""

    kind = "none"
    end_of_document: Any = None

    def __init__(self, vocab_size: int):
        self.ends, self.files = set(), {}
        self.pieces = [b""] * vocab_size
        self.hash = hashlib.sha256(b"%d ids" % vocab_size).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        raise ValueError("text needs a tokenizer, and the token files came without one; generate(model, ids) takes ids")


TOKENIZER_KINDS = (ByteTokenizer.kind, SentencePieceTokenizer.kind, NoTokenizer.kind)  # those without files of others


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def piece_bytes(piece: str) -> bytes:
    """The UTF-8 bytes of a SentencePiece piece of text, or of a byte piece such as <0x0A>."""
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[1:-1], 16)])
    return piece.replace(SPACE, " ").encode()


def byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: itself if printable in Latin-1, or one from U+0100 on."""
    others = [byte for byte in range(256) if byte == ord(" ") or not chr(byte).isprintable()]
    return {chr(256 + others.index(byte) if byte in others else byte): byte for byte in range(256)}


def load_tokenizer(kind: str, directory: Path, vocab_size: int = 0) -> Tokenizer:
    """Load our own tokenizer from `directory`. Raises ValueError if it is missing or damaged."""
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    if kind == NoTokenizer.kind:
        return NoTokenizer(vocab_size)
    path = directory / "tokenizer.model"
    try:
        return SentencePieceTokenizer(path.read_bytes())
    except (OSError, RuntimeError):
        raise ValueError(f"{path}: not a readable SentencePiece model") from None


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Train SentencePiece BPE on at most 8 MB sampled evenly from `texts`. The same text gives the same tokenizer."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # U+2585 is the trainer's mark of the unknown: it drops a block that has one. NUL is unknown to it too.
            sentence_iterator=(block.replace("\u2585", "\0") for block in _sample(texts)),
            model_writer=model,
            model_type="bpe",
            vocab_size=max(vocab_size, 3),  # below 3 it fails before it reports the minimum
            byte_fallback=True,
            character_coverage=0.9999,  # rarer characters are encoded as bytes
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            # Characters with a meaning of their own always have a piece, also where the text has none of them. The
            # trainer reserves tabs for itself and never learns a piece with one.
            required_chars="\n" + SPACE,
            user_defined_symbols=["\t"],
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
        message = str(error).strip()
        if largest := re.search(r"too high .* <= (\d+)", message):
            problem = f"--vocab-size {vocab_size} is too large for this text; use at most {largest[1]}"
        elif smallest := re.search(r"smaller than required_chars.* vs (\d+)", message):
            problem = f"--vocab-size {vocab_size} cannot hold every byte and character; use at least {smallest[1]}"
        else:
            problem = f"SentencePiece learns nothing from this text ({message}); use --tokenizer bytes"
        raise ValueError(problem) from None
    tokenizer = SentencePieceTokenizer(model.getvalue())
    # Text of line ends, NUL and U+2585 only gives no piece, not even the space.
    require(len(tokenizer.encode(" ")) == 1, "SentencePiece learns nothing from this text; use --tokenizer bytes")
    return tokenizer


def _sample(texts: Iterable[str]) -> list[str]:
    """Every n-th block of the text, with n a power of 2 that leaves 4 to 8 MB; all of it if there is less."""
    kept = []
    size, stride = 0, 1
    for number, block in enumerate(block for text in texts for block in _blocks(text, SAMPLE_CHARS)):
        if number % stride == 0:
            kept.append(block)
            size += len(block.encode())
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
