"""Models from others that are made to do harm are refused in one line, before memory is taken, or do none."""

import json
import os
import re
import shutil
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


def write(directory: Path, kind: str = "llama") -> Path:
    """A new directory with a model as `transformers` leaves it, or for "ours" as we do."""
    save_pretrained(directory, Llama(KINDS[kind]), ByteTokenizer())
    if kind == "llama":
        change(directory, normal_llama=None)
    return directory


def change(directory: Path, **fields: Any) -> None:
    """Change fields of config.json, or of our model in it."""
    path = directory / "config.json"
    described = json.loads(path.read_text())
    if own := described.get("normal_llama"):
        own["model"] |= fields.pop("model", {})
    path.write_text(json.dumps(described | fields))


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("llama", {"num_hidden_layers": 10**4}), ("llama", {"num_hidden_layers": MOST}),
        ("llama", {"max_position_embeddings": MOST}), ("llama", {"vocab_size": MOST}),
        ("llama", {"hidden_size": 2**30}), ("llama", {"head_dim": MOST - 1}),
        ("llama", {"num_attention_heads": 2**30, "num_key_value_heads": 2**30, "head_dim": 2}),
        ("ours", {"model": {"layers": 9999}}), ("ours", {"model": {"context": 10**8}}),
        ("ours", {"model": {"vocab_size": 10**9}}), ("ours", {"model": {"placement": "mix", "layers": 9999}}),
    ],
)  # fmt: skip
def test_huge_sizes_are_refused_before_the_model_is_allocated(kind, fields, tmp_path, monkeypatch):
    directory = write(tmp_path / "theirs", kind)
    change(directory, **fields)
    monkeypatch.setattr(Llama, "load_state_dict", lambda *args, **options: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=re.escape(str(directory))):
        load_pretrained(directory)


def content(name: str, text: str | bytes) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_bytes(text.encode() if isinstance(text, str) else text)


def header(text: bytes, length: int | None = None) -> Callable[[Path], Any]:
    """A safetensors file with this header, which may say that it has another length."""
    return content("model.safetensors", struct.pack("<Q", len(text) if length is None else length) + text)


def value(name: str, value: float, dtype: torch.dtype) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        weights = {each: tensor.to(dtype) for each, tensor in load_file(directory / "model.safetensors").items()}
        weights[name].view(-1)[3] = value
        save_file(weights, directory / "model.safetensors")

    return damage


def fifo(name: str) -> Callable[[Path], None]:
    def replace(directory: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return replace


def indexed(directory: Path) -> None:
    """An index that says that all weights are in a file above the directory."""
    names = list(load_file(directory / "model.safetensors"))
    outside = shutil.move(directory / "model.safetensors", directory.parent / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(names, str(outside))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


EMBEDDING = "model.embed_tokens.weight"
HUGE_TENSOR = json.dumps({EMBEDDING: {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 0]}}).encode()
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {  # what is done to a directory, and the error
    "a deep configuration": (content("config.json", "[" * 100_000), "config.json is missing or damaged"),
    "a large configuration": (content("config.json", '{"a": "' + "x" * 10_000_000 + '"}'), "config.json is missing or"),
    "a long value": (lambda d: change(d, model_type="x" * 3_000_000), "model_type"),
    "a field with escapes": (lambda d: change(d, **{"\x1b[2J\n": 1}), r"\\x1b\[2J\\n"),
    "a configuration in UTF-16": (content("config.json", b"\xff\xfe{\0"), "config.json is missing or damaged"),
    "NaN as a number": (lambda d: change(d, rms_norm_eps=float("nan")), "rms_norm_eps must be a number"),
    "a FIFO as weights": (fifo("model.safetensors"), "holds no model.safetensors"),
    "no tensors": (header(b"{}"), "the weights are 0 tensors"),
    "a header of 2**63 bytes": (header(b"{}", 2**63), "not a readable safetensors file"),
    "a deep header": (header(b'{"a":' * 50_000), "not a readable safetensors file"),
    "a tensor of 2**80 values": (header(HUGE_TENSOR), "not a readable safetensors file"),
    "float64": (value(EMBEDDING, 1.0, torch.float64), "another dtype than F32, BF16, F16"),
    "eight bits": (value(EMBEDDING, 1.0, torch.float8_e4m3fn), "another dtype than F32, BF16, F16"),
    "NaN": (value(EMBEDDING, float("nan"), torch.float32), f"{EMBEDDING} has values that are NaN or infinite"),
    "infinity": (value("lm_head.weight", -float("inf"), torch.float16), "lm_head.weight has values that are NaN"),
    "an index to another place": (indexed, "which is not a .safetensors file in"),
    "a deep manifest": (content("manifest.json", "[" * 100_000), "manifest.json is missing or damaged"),
    "a deep tokenizer": (content("tokenizer.json", "[" * 100_000), "tokenizer.json"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_directories(case, tmp_path, ends):
    damage, pattern = HOSTILE[case]
    directory = write(tmp_path / "theirs")
    damage(directory)
    code, error = ends(generate.main, ["--checkpoint", str(directory), "--device", "cpu"])
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1 and len(error) < 2000
    assert re.search(pattern, error), error
