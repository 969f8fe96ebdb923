"""The text behind the pieces of a vocabulary, as bytes."""

import sentencepiece

SPACE = "\u2581"  # how SentencePiece writes a space


def utf8(text: str) -> bytes:
    """`text` in UTF-8. Raises ValueError for a lone surrogate, which UTF-8 cannot encode."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is a lone surrogate, which UTF-8 cannot encode") from None


def sentencepiece_bytes(processor: sentencepiece.SentencePieceProcessor) -> list[bytes]:
    """The UTF-8 bytes of each id: none for control pieces and the unknown piece."""
    return [_bytes_of(processor, token) for token in range(processor.vocab_size())]


def _bytes_of(processor: sentencepiece.SentencePieceProcessor, token: int) -> bytes:
    piece = processor.id_to_piece(token)
    if processor.is_byte(token):
        return bytes([int(piece[1:-1], 16)])
    if processor.is_control(token) or processor.is_unknown(token):
        return b""
    return piece.replace(SPACE, " ").encode()


def byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE, since GPT-2, writes for each byte.

    Bytes that are printable in Latin-1 are themselves; the others are the characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
