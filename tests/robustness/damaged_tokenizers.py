"""Loads damaged tokenizers of both kinds and encodes with those that load: `python damaged_tokenizers.py COUNT`.

Prints how many there were of each kind and how many were refused. Whatever else happens ends this process: an abort, a
hang, 4 GB of memory, an error that is no ValueError or that has several lines.
"""

import copy
import io
import json
import random
import resource
import string
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from data.pieces import byte_level_alphabet
from data.pretrained import PretrainedTokenizer
from data.tokenizer import SentencePieceTokenizer, train_tokenizer

TEXTS = ["the cat sees", "日本 naïve\n\n\t ▁ <s>", "", " " * 50, "".join(map(chr, range(1, 300))), "a" * 60]
PIECES = [
    "",
    "a",
    "▁",
    "▁▁",
    "<0x41>",
    "<0xZZ>",
    "<0x>",
    "<unk>",
    "<s>",
    "</s>",
    "\n",
    "a" * 5000,
    "\0",
    "日本",
    "\ufffd",
]


def sentencepiece_models(words: list[str]) -> list[bytes]:
    """Ours, a unigram model without bytes, and a BPE model with bytes; the last two normalize."""
    draw = random.Random(0)
    lines = [" ".join(draw.choices(words, k=12)) for _ in range(300)]
    models = [train_tokenizer(["\n".join(lines)], 300).model]
    kinds: list[dict[str, Any]] = [{"model_type": "unigram"}, {"model_type": "bpe", "byte_fallback": True}]
    for size, options in zip((30, 310), kinds, strict=True):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=size, minloglevel=2, **options
        )
        models.append(model.getvalue())
    return models


def damage_bytes(model: bytes, draw: random.Random) -> bytes:
    changed = bytearray(model)
    at, other = draw.randrange(len(model)), draw.randrange(len(model))
    how = draw.randrange(4)
    if how == 0:
        del changed[at : at + draw.randrange(1, 60)]
    elif how == 1:
        changed[at:at] = model[other : other + draw.randrange(1, 60)]
    else:
        for _ in range(draw.choice([1, 1, 2, 5, 20])):
            changed[draw.randrange(len(model))] = draw.randrange(256)
    return bytes(changed)


def damage_fields(model: bytes, draw: random.Random) -> bytes:
    """A model that is a valid protobuf, with odd pieces, ids, and tables of characters."""
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model)
    for _ in range(draw.choice([1, 1, 2, 3, 6])):
        piece = draw.choice(proto.pieces) if proto.pieces else proto.pieces.add(piece="x")
        how = draw.randrange(9)
        if how == 0:
            piece.score = draw.choice([float("nan"), float("inf"), -float("inf"), 1e30, 0])
        elif how == 1:
            piece.type = draw.randrange(1, 7)
        elif how == 2:
            piece.piece = draw.choice(PIECES)
        elif how == 3:
            proto.pieces.add(piece=draw.choice(PIECES), score=draw.choice([0, -5]), type=draw.randrange(1, 7))
        elif how == 4:
            del proto.pieces[draw.randrange(len(proto.pieces) + 1) :]
        elif how == 5:
            proto.trainer_spec.model_type = draw.randrange(1, 5)
        elif how == 6:
            name = draw.choice(["unk_id", "bos_id", "eos_id", "pad_id", "vocab_size"])
            setattr(proto.trainer_spec, name, draw.choice([-(2**31), -1, 0, 2, 260, 10**6, 2**31 - 1]))
        elif how == 7:
            name = draw.choice(["unk_piece", "bos_piece", "eos_piece", "unk_surface"])
            setattr(proto.trainer_spec, name, draw.choice(PIECES))
        else:
            spec = draw.choice([proto.normalizer_spec, proto.denormalizer_spec])
            units = draw.choice([1, 100, 256, 512])
            size = draw.choice([4 * units, 4 * units, 0, 3, 2**31, 2**32 - 1])
            spec.precompiled_charsmap = (
                struct.pack("<I", size) + draw.randbytes(4 * units) + b"abc\0" * draw.randrange(3)
            )
    return proto.SerializeToString()


def load_sentencepiece(model: bytes) -> list[Any]:
    return [PretrainedTokenizer("tokenizer.model", model, None, begins=True), SentencePieceTokenizer(model)]


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
BYTES = {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
MODELS: list[dict[str, Any]] = [
    {
        "version": "1.0", "added_tokens": [{"id": 256, "content": "</s>"} | ADDED], "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL, "post_processor": None, "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE", "vocab": byte_level_alphabet() | {"</s>": 256, "th": 257, "the": 258},
            "merges": [["t", "h"], ["th", "e"]],
        },
    },
    {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": 0, "content": "<unk>"} | ADDED, {"id": 1, "content": "</s>"} | ADDED],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            {"type": "Precompiled", "precompiled_charsmap": ""},
        ]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing", "pair": [],
            "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
            "vocab": {"<unk>": 0, "</s>": 1} | BYTES | {"▁": 258, "t": 259, "h": 260, "th": 261},
            "merges": ["t h"],
        },
    },
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, 1.5, float("nan"), "", "a", "▁", "BPE", "Sequence", "\0",
    "ByteLevel", "Unigram", "Split", "Strip", "Template", "NFKC", "(a+)+$", "x" * 2000, "\ud800", [], {}, [[]], [None],
    {"a": 1}, {"type": "Sequence"}, {"type": "NFC"}, ["t", "h"], {"String": ""}, {"Regex": "(a|aa)+$"}, {"Regex": "("},
]  # fmt: skip


def damage_json(fields: dict[str, Any], draw: random.Random) -> bytes:
    """A tokenizer.json with odd values anywhere, some of them with odd bytes too."""
    changed = copy.deepcopy(fields)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        inside: Any = changed
        while inside:
            key = draw.choice(sorted(inside) if isinstance(inside, dict) else range(len(inside)))
            if isinstance(inside[key], dict | list) and inside[key] and draw.random() < 0.8:
                inside = inside[key]
                continue
            if draw.random() < 0.2:
                del inside[key]
            else:
                inside[key] = copy.deepcopy(draw.choice(ODD))
            break
    content = json.dumps(changed).encode()
    return damage_bytes(content, draw) if draw.random() < 0.2 else content


def load_json_tokenizer(content: bytes) -> list[Any]:
    return [PretrainedTokenizer("tokenizer.json", content, "</s>")]


def main(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    draw, refused = random.Random(0), Counter[str]()
    words = ["the", "cat", "sees", "naïve", "日本", *string.ascii_lowercase[:8]]
    whole = sentencepiece_models(words)
    attempts: dict[str, Callable[[], list[Any]]] = {
        "sentencepiece_bytes": lambda: load_sentencepiece(damage_bytes(draw.choice(whole), draw)),
        "sentencepiece_fields": lambda: load_sentencepiece(damage_fields(draw.choice(whole), draw)),
        "tokenizer_json": lambda: load_json_tokenizer(damage_json(draw.choice(MODELS), draw)),
    }
    for name, attempt in attempts.items():
        for number in range(count):
            print(name, number, file=sys.stderr, flush=True)  # the last line names what ended the process
            try:
                for tokenizer in attempt():
                    for text in TEXTS:
                        tokenizer.decode(tokenizer.encode(text))
                        tokenizer.encode_prompt(text)
            except ValueError as error:
                assert "\n" not in str(error), error
                refused[name] += 1
    print(json.dumps({"each": count, "refused": refused}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
