"""Generation with `decode.c`: after the prompt, one call of C computes a token of each sequence.

It serves the reference architecture, RMSNorm and pre-norm with sizes that are multiples of 16, in fp32 or with matrices
in bf16. Another norm or placement runs plain, and so does an edited model.py: `accelerate` computes tokens both ways.
From then on it is for generation alone: hooks, gradients, and changes to the model or to a cache are not noticed.
"""

import ctypes
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from config import ModelConfig
from fast.native import load
from model import LayerCache, Llama

MAX_BATCH = 32  # torch's products are faster for more
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # largest rounding difference, by the matrices' dtype
RMSNORM = {"elementwise_affine": True, "zero_centered": False, "cast_order": "fp32"}  # eps may be any

# The weights of a block in the order of decode.c: two vectors, then matrices.
PATHS = ["attention_residual.norm", "mlp_residual.norm", *(f"self_attn.{name}_proj" for name in "qkvo")]
PATHS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def accelerate(model: Llama, samples: int = 1) -> "FastDecoder | str":
    """A decoder of `model` with which C computes the tokens after a prompt, for so many samples, or why it cannot."""
    if samples > MAX_BATCH:
        return f"for more than {MAX_BATCH} samples torch is faster"
    if reason := unsupported(model.config) or load(model.lm_head.weight.dtype)[1] or load(torch.float32)[1]:
        return reason
    with suppress(AssertionError, RuntimeError, ValueError):  # an edit may work for some sizes only
        if agrees(model, 64) and agrees(miniature(model.config), 4096):
            return FastDecoder(model)
    return "model.py computes something else"


def unsupported(config: ModelConfig) -> str | None:
    """The first setting that decode.c does not have; None if it has all."""
    if any(size % 16 for size in (config.dim, config.head_dim, config.hidden_dim)):
        return "it needs --dim, --head-dim and --hidden-dim to be multiples of 16"
    defaults = vars(type(config)()) | RMSNORM
    settings = vars(config) | config.norm_args
    computed = [each.name for each in fields(config) if each.metadata["export"] == "computed"]
    for name in [*computed, *config.norm_args]:
        if name not in ("norm_args", "eps") and settings[name] != defaults.get(name):
            return f"it does not support {name} {settings[name]}"
    return None


@torch.inference_mode()
def miniature(config: ModelConfig) -> Llama:
    """A small model in fp32, in which every part matters: after most edits of model.py it differs beyond rounding."""
    config = replace(config, dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, hidden_dim=64, vocab_size=64)
    model = Llama(config).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.normal_(std=0.3, generator=generator)
    return model


@torch.inference_mode()
def agrees(model: Llama, most: int) -> bool:
    """Whether C computes what model.py does, which may have been edited: logits after up to `most` cached tokens."""
    config = model.config
    dtype = model.lm_head.weight.dtype
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    cache = Cache(model.new_cache(most + 1))
    past = min(config.context - 1, most)
    shape = 2, 1, config.kv_heads, past, config.head_dim  # keys and values
    generator = torch.Generator().manual_seed(0)
    for kept in cache:
        kept.extend(*torch.randn(shape, generator=generator).to(dtype))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        expected = model.next_logits(tokens, cache).float()
    for kept in cache:
        kept.length = past  # again, in the same memory
    found = cache.next_logits(model, tokens)
    return found is not None and bool((found - expected).abs().max() <= BOUNDS[dtype] * expected.abs().max())


class FastDecoder:
    """Generation with `model`: C computes the tokens after a prompt, the model itself what C cannot."""

    def __init__(self, model: Llama):
        self.model = model

    def new_cache(self, tokens: int | None = None) -> "Cache":
        return Cache(self.model.new_cache(tokens))

    def next_logits(self, tokens: Tensor, cache: "Cache") -> Tensor:
        logits = cache.next_logits(self.model, tokens)
        return self.model.next_logits(tokens, cache) if logits is None else logits


class Cache(list[LayerCache]):
    """The cache of `FastDecoder`, with the table of sizes and pointers that decode.c reads."""

    step: Any = None  # the function of C, the table, eps and the memory that the table points to

    def next_logits(self, model: Llama, tokens: Tensor) -> Tensor | None:
        """Logits (B, V) after `tokens` (B, 1), or None where torch continues: for a prompt and past the cache."""
        config = model.config
        seen = self[0].length
        tokens = tokens.long().contiguous()
        size = min(self[0].size, config.context)
        if tokens.shape[1] > 1 or not 0 < seen < size or not (self.step or self.plan(model)):
            return None
        decode, table, eps, memory = self.step
        logits = memory[0].new_empty(table[0], config.vocab_size)
        if len(tokens) != table[0] or not decode(table, eps, seen, tokens.data_ptr(), logits.data_ptr()):
            return None
        for kept in self:
            kept.length += 1
        return logits

    def plan(self, model: Any) -> bool:
        """Fill in the table. False if a tensor is not as decode.c reads it."""
        config = model.config
        dtype = model.lm_head.weight.dtype
        batch = len(self[0].keys)
        context = self[0].size
        dim = config.dim
        hidden = config.hidden_dim
        queries = config.heads * config.head_dim
        keys = config.kv_heads * config.head_dim
        vocabulary = (config.vocab_size, dim)
        rotary = (config.context, config.head_dim // 2)
        cached = batch, config.kv_heads, context, config.head_dim
        matrices = (queries, dim), (keys, dim), (keys, dim), (dim, queries), (hidden, dim), (hidden, dim), (dim, hidden)
        state = model.state_dict() | dict(model.named_buffers())
        names = ["embed_tokens.weight", "rope.cos", "rope.sin", "final_norm.weight", "lm_head.weight"]
        tensors: list[Any] = [state.get(name) for name in names]
        shapes = [vocabulary, rotary, rotary, (dim,), vocabulary]
        dtypes = 4 * [torch.float32] + [dtype]
        for layer, kept in enumerate(self):
            tensors += [*(state.get(f"layers.{layer}.{path}.weight") for path in PATHS), kept.keys, kept.values]
            shapes += [(dim,), (dim,), *matrices, cached, cached]
            dtypes += 2 * [torch.float32] + 9 * [dtype]
        if not all(tensor is not None and tensor.is_cpu and tensor.is_contiguous() for tensor in tensors):
            return False
        if [tensor.shape for tensor in tensors] != shapes or [tensor.dtype for tensor in tensors] != dtypes:
            return False
        scratch = dim, queries, keys, keys, queries, config.heads * context, hidden, hidden
        memory = [torch.empty(batch * size, dtype=torch.float32, device="cpu") for size in scratch] + tensors
        sizes = batch, config.layers, dim, config.heads, config.kv_heads, config.head_dim, hidden
        values = [*sizes, context, config.vocab_size, *map(Tensor.data_ptr, memory)]
        decode = load(dtype)[0].decode  # type: ignore[union-attr]
        self.step = decode, (ctypes.c_int64 * len(values))(*values), model.final_norm.eps, memory
        return True
