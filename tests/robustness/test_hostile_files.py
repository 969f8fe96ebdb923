"""Models from others that are made to do harm are refused in one line, before memory is taken."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import generate
from config import ModelConfig
from data.tokenizer import ByteTokenizer
from model import Llama
from runtime.checkpoint import load_pretrained, save_pretrained

SIZES: dict[str, Any] = dict(dim=16, layers=2, heads=2, hidden_dim=24, context=16, vocab_size=257)
KINDS = {"llama": ModelConfig(**SIZES, tie_embeddings=False), "ours": ModelConfig(**SIZES, placement="post")}
MOST = 2**31 - 1


def write(directory: Path, kind: str, **fields: Any) -> Path:
    """A model as `transformers` leaves it, or for "ours" as we do, with other values of fields in config.json."""
    save_pretrained(directory, Llama(KINDS[kind]), ByteTokenizer())
    path = directory / "config.json"
    described = json.loads(path.read_text())
    if kind == "ours":
        described["normal_llama"]["model"] |= fields
    else:
        described |= fields | {"normal_llama": None}
    path.write_text(json.dumps(described))
    return directory


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("llama", {"num_hidden_layers": MOST}), ("llama", {"max_position_embeddings": MOST}),
        ("llama", {"vocab_size": MOST}), ("llama", {"hidden_size": 2**30}), ("llama", {"head_dim": MOST - 1}),
        ("ours", {"layers": 9999}), ("ours", {"context": 10**8}), ("ours", {"vocab_size": 10**9}),
    ],
)  # fmt: skip
def test_huge_sizes_are_refused_before_the_model_is_allocated(kind, fields, tmp_path, monkeypatch):
    directory = write(tmp_path / "theirs", kind, **fields)
    monkeypatch.setattr(Llama, "load_state_dict", lambda *args, **options: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=re.escape(str(directory))):
        load_pretrained(directory)


def content(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_bytes(data)


def header(text: bytes, length: int | None = None) -> Callable[[Path], Any]:
    """A safetensors file with this header, which may say that it has another length."""
    return content("model.safetensors", struct.pack("<Q", len(text) if length is None else length) + text)


def value(name: str, value: float, dtype: torch.dtype) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        weights = {each: tensor.to(dtype) for each, tensor in load_file(directory / "model.safetensors").items()}
        weights[name].view(-1)[3] = value
        save_file(weights, directory / "model.safetensors")

    return damage


EMBEDDING = "model.embed_tokens.weight"
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {  # what is done to a directory, and the error
    "a deep configuration": (content("config.json", b"[" * 100_000), "config.json is missing or damaged"),
    "escapes": (content("config.json", b'{"model_type": "\\u001b[2J"}'), r"model_type '\\x1b\[2J' is not supported"),
    "no tensors": (header(b"{}"), "but has only 0 tensors"),
    "a header of 2**63 bytes": (header(b"{}", 2**63), "not a readable safetensors file"),
    "eight bits": (value(EMBEDDING, 1.0, torch.float8_e4m3fn), "a dtype other than F32, BF16, F16"),
    "NaN": (value(EMBEDDING, float("nan"), torch.float32), f"{EMBEDDING} has values that are NaN or infinite"),
    "a deep tokenizer": (content("tokenizer.json", b"[" * 100_000), "tokenizer.json"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_directories(case, tmp_path, ends):
    damage, pattern = HOSTILE[case]
    directory = write(tmp_path / "theirs", "llama")
    damage(directory)
    code, error = ends(generate.main, ["--checkpoint", str(directory), "--device", "cpu"])
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1 and len(error) < 2000
    assert re.search(pattern, error), error
