"""Parity with `transformers` through directories on disk, both ways, for random configurations of six architectures.

`pytest tests/test_parity.py -s` prints the errors; with `-m "slow or not slow"`, those of all 30 configurations.
"""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from config import ModelConfig
from data.tokenizer import SentencePieceTokenizer, train_tokenizer
from generate import Sampling, stream_ids
from model import Llama
from runtime.checkpoint import load_pretrained, save_pretrained
from runtime.huggingface.architectures import architecture_of

transformers = pytest.importorskip("transformers")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONTEXT, VOCAB = 128, 384
OURS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": "head"},
    "olmo": {"norm": "layernorm", "norm_args": {"elementwise_affine": False}},
    "olmo2": {"placement": "reordered", "qk_norm": "full"},
    "stablelm": {"norm": "layernorm"},
    "gemma2": {"placement": "sandwich", "norm_args": {"zero_centered": True}},
}
CASES = [
    pytest.param(name, seed, id=f"{name}-{seed}", marks=[pytest.mark.slow] if seed else [])
    for seed in range(5)
    for name in OURS
]


def draw_config(name: str, seed: int) -> ModelConfig:
    """A random configuration that the architecture expresses."""
    choose = random.Random(f"{name} {seed}").choice
    heads = choose([2, 4])
    dim = heads * choose([8, 16])
    head_dim = None if name == "stablelm" else choose([None, 8, 24])
    norm_args = OURS[name].get("norm_args", {}) | ({} if name == "olmo" else {"eps": choose([1e-3, 1e-5, 1e-6])})
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32.0}
    return ModelConfig(
        **OURS[name] | dict(
            dim=dim, layers=choose([1, 3]), heads=heads, kv_heads=choose([1, 2, heads]), head_dim=head_dim,
            hidden_dim=choose([48, 96]), context=CONTEXT, vocab_size=VOCAB, rope_theta=choose([500.0, 1e4, 5e5]),
            rope_scaling=choose([{}, scaling]), tie_embeddings=choose([True, False]), norm_args=norm_args,
            embedding_scale=dim**0.5 if name == "gemma2" else 1.0,
        )
    )  # fmt: skip


def draw_model(config: ModelConfig) -> Llama:
    """Random weights: sharp attention, gains far from 1, and logits of about 1."""
    model, generator = Llama(config).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            centered = name.endswith("bias") or config.norm_args.get("zero_centered", False)
            weight.copy_(noise / math.sqrt(weight.shape[-1]) if weight.ndim == 2 else 0.3 * noise + (not centered))
        model.embed_tokens.weight.div_(config.embedding_scale)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceTokenizer:
    return train_tokenizer([Path(__file__).read_text("utf-8")] * 3, VOCAB)


def tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of the files in a directory."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_bytes(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def in_transformers_4(directory: Path) -> None:
    """Spell the rotary parameters as transformers 4 does."""
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    (directory / "config.json").write_text(json.dumps(config))


TOKENS = torch.randint(0, VOCAB, (8, 48), generator=torch.Generator().manual_seed(2))


def their_model(directory: Path, dtype: torch.dtype) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval()


def greedy(ours: Llama, theirs: Any, end: int) -> tuple[list[int], list[int]]:
    """Each model's continuation of a prompt by up to 100 tokens."""
    prompt = TOKENS[:1, :8]
    generated = theirs.generate(
        prompt, do_sample=False, max_new_tokens=100, attention_mask=torch.ones_like(prompt), pad_token_id=0
    )
    sampling = Sampling(tokens=100, temperature=0)
    return [token for (token,) in stream_ids(ours, prompt, sampling, end)], generated[0, 8:].tolist()


@dataclass
class Errors:
    """The largest difference of a logit in fp32, and in bf16 the RMS errors of our model and of theirs."""

    fp32: float
    ours: float
    theirs: float


@torch.no_grad()
def logit_errors(directory: Path) -> Errors:
    """In bf16, both models have bf16 weights and a bf16 residual stream, and are compared with theirs in float64."""
    ours, theirs = load_pretrained(directory)[0].float(), their_model(directory, torch.float32)
    fp32 = float((ours(TOKENS) - theirs(TOKENS).logits).abs().max())
    ours = ours.bfloat16()
    for weight in theirs.parameters():  # not `theirs.bfloat16()`, which would round the RoPE frequencies too
        weight.data = weight.bfloat16()
    logits = ours(TOKENS), theirs(TOKENS).logits
    assert all(each.dtype == torch.bfloat16 for each in logits)
    exact = theirs.double()(TOKENS).logits
    return Errors(fp32, *(float((each - exact).square().mean().sqrt()) for each in logits))


@pytest.mark.parametrize("name, seed", CASES)
def test_parity_and_round_trips(tmp_path, capsys, tokenizer, name, seed):
    ours = draw_model(draw_config(name, seed))
    config = ours.config
    assert architecture_of(config) == name

    # Ours opens in transformers.
    save_pretrained(tmp_path / "ours", ours, tokenizer)
    theirs = their_model(tmp_path / "ours", torch.float32)
    with torch.no_grad():
        assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() <= 1e-5
    mine, generated = greedy(ours, theirs, tokenizer.end_of_document)
    assert mine == generated

    # Theirs opens here: other dtypes, several files, both spellings of the rotary parameters.
    choose = random.Random(f"files of {name} {seed}").choice
    dtype = choose(list(DTYPES.values()))
    directory, again = tmp_path / "theirs", tmp_path / "again"
    theirs.to(dtype).save_pretrained(directory, max_shard_size=choose(["20KB", "1GB"]))
    tokenizer.save(directory)
    if choose([True, False]):
        in_transformers_4(directory)
    loaded, loaded_tokenizer = load_pretrained(directory)
    assert loaded.config == config and loaded_tokenizer.hash == tokenizer.hash
    assert loaded.embed_tokens.weight.dtype == dtype
    # Ours → theirs → ours has the same bytes, and so has theirs → ours → theirs.
    assert_same_bytes(loaded.state_dict(), {name: tensor.to(dtype) for name, tensor in ours.state_dict().items()})
    save_pretrained(again, loaded, loaded_tokenizer)
    assert_same_bytes(tensors(again), tensors(directory))
    assert_same_bytes(their_model(again, dtype).state_dict(), theirs.state_dict())

    # A directory of theirs that knows nothing of us.
    described = json.loads((directory / "config.json").read_text())
    del described["normal_llama"]
    (directory / "config.json").write_text(json.dumps(described))
    errors = logit_errors(directory)
    with capsys.disabled():
        print(f"\n| {name} | {errors.fp32:.1e} | {errors.ours:.2e} | {errors.theirs:.2e} | ", end="")
    assert errors.fp32 <= 1e-5
    assert errors.ours <= errors.theirs
