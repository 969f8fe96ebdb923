"""Text to ids and back, without loss: SentencePiece BPE with byte fallback, or the bytes themselves."""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import sentencepiece

SAMPLE_BYTES = 8_000_000  # of text that a tokenizer is trained on at most
BLOCK = 4096  # characters that are sampled together
LONGEST = 16384  # characters that SentencePiece is given at once; its queue of merges grows with them
SPACE = "\u2581"  # what SentencePiece writes for a space


class ByteTokenizer:
    """A token for each of the 256 bytes, and one that ends a document."""

    kind = "bytes"
    vocab_size = 257
    end_of_document = 256
    token_bytes = np.array([1] * 256 + [0])
    hash = hashlib.sha256(b"256 bytes, end of document").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for half a surrogate pair, which is no character."""
        return list(_utf8(text))

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """UTF-8, which the ids may leave in the middle of a character; the end of a document is no text."""
        return bytes(token for token in ids if token != self.end_of_document)

    def save(self, directory: Path) -> None:
        """There is nothing to save."""


class SentencePieceTokenizer:
    """A SentencePiece model with byte fallback, its ids laid out as LLaMA's: unknown, start, end, 256 bytes, pieces.

    decode(encode(text)) == text for all that UTF-8 can encode, and no text becomes one of the first three ids.

    token_bytes: of each id, the length in UTF-8; 0 for the first three. Summed over encode(text), the text's length.
    hash: SHA-256 of the model, in hex.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        self.model = model
        self.hash = hashlib.sha256(model).hexdigest()
        self._pieces = sentencepiece.SentencePieceProcessor()
        self._pieces.LoadFromSerializedProto(model)
        self.vocab_size = self._pieces.vocab_size()
        self.end_of_document = self._pieces.eos_id()
        self._bytes = [self._spell(token) for token in range(self.vocab_size)]
        self.token_bytes = np.array([len(spelling) for spelling in self._bytes])
        self._space = [self._pieces.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]

    def _spell(self, token: int) -> bytes:
        piece = self._pieces.id_to_piece(token)
        if self._pieces.is_byte(token):
            return bytes([int(piece[1:-1], 16)])
        if self._pieces.is_control(token) or self._pieces.is_unknown(token):
            return b""
        return piece.replace(SPACE, " ").encode()

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for half a surrogate pair, which is no character."""
        _utf8(text)
        ids: list[int] = []
        # SentencePiece takes U+2581 for a space, so it never sees one: its bytes are put between the parts.
        for number, part in enumerate(text.split(SPACE)):
            if number:
                ids += self._space
            for tokens in self._pieces.encode(list(_blocks(part, LONGEST))):
                ids += tokens
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """UTF-8, which the ids may leave in the middle of a character; the end of a document is no text."""
        return b"".join([self._bytes[token] for token in ids])

    def save(self, directory: Path) -> None:
        """Write `tokenizer.model`, which other SentencePiece programs read too."""
        (directory / "tokenizer.model").write_bytes(self.model)


Tokenizer = ByteTokenizer | SentencePieceTokenizer


def load_tokenizer(kind: str, directory: Path) -> Tokenizer:
    """The tokenizer that was saved in `directory`. Raises ValueError if it is not there, or is damaged."""
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    path = directory / "tokenizer.model"
    try:
        return SentencePieceTokenizer(path.read_bytes())
    except (OSError, RuntimeError):
        raise ValueError(f"{path}: not a readable SentencePiece model") from None


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Learn `vocab_size` pieces from at most 8 MB spread evenly over `texts`. The same text gives the same pieces.

    Raises ValueError if the text cannot fill that vocabulary, or has more characters than fit into it.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(_sample(texts)),
            model_writer=model,
            model_type="bpe",
            vocab_size=max(vocab_size, 3),  # with less it fails before it knows how many it needs
            byte_fallback=True,
            character_coverage=0.9999,  # rarer characters are spelt in bytes
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            required_chars="\n",
            user_defined_symbols=["\t"],  # the trainer needs tabs for itself, and would never make one a piece
            # Words and signs apart, and no piece across a space. Pieces like `    self.` and ` of the` would take a
            # tenth fewer tokens and yet a tenth more bits a byte, since the same word is then cut in many ways.
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


def _vocabulary_error(message: str, vocab_size: int) -> Exception:
    if most := re.search(r"too high .* <= (\d+)", message):
        return ValueError(f"--vocab-size {vocab_size} is more than this text can fill; at most {most[1]}")
    if least := re.search(r"smaller than required_chars.* vs (\d+)", message):
        return ValueError(f"--vocab-size {vocab_size} cannot hold every byte and character; at least {least[1]}")
    return RuntimeError(message)


def _sample(texts: Iterable[str]) -> list[str]:
    """Every n-th block of the text, with the n that leaves between 4 and 8 MB, or all there is."""
    kept: list[str] = []
    size, every, number = 0, 1, 0
    for text in texts:
        for block in _blocks(text, BLOCK):
            if number % every == 0:
                kept.append(block)
                size += len(block.encode())
            number += 1
            if size > SAMPLE_BYTES:
                kept, every = kept[::2], every * 2
                size = sum(len(block.encode()) for block in kept)
    return kept


def _blocks(text: str, longest: int) -> Iterator[str]:
    """`text` in blocks, cut at line ends where it can be."""
    start = 0
    while len(text) - start > longest:
        end = text.rfind("\n", start, start + longest) + 1 or start + longest
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} of the text is half a surrogate pair, which UTF-8 lacks") from None
