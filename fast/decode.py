"""Generation with `decode.c`: after the prompt, one call of C computes a token of each sequence, in inference mode.

It serves the reference architecture, RMSNorm and pre-norm, in fp32 or with matrices in bf16. A model with another norm,
a hook, an adapter or edited code runs plain, and so does everything but `next_logits`. Between two tokens, new hooks
and replaced modules, weights and caches are noticed; a changed mode or number counts from the next cache on.
"""

import ctypes
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

from config import ModelConfig
from fast.native import load
from model import LayerCache, Llama

MAX_BATCH = 32  # as in decode.c; torch's products are faster for more
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of differences that are rounding, by the matrices' dtype

NUMBERS = int, float, str  # attributes that are compared
REFERENCES: dict[str, dict[str, Any]] = {}

# How many modules, parameters and buffers have been set anywhere: one of an accelerated model may have been replaced.
registrations = [0]


def count(*arguments: Any) -> None:
    registrations[0] += 1


nn_module.register_module_module_registration_hook(count)
nn_module.register_module_parameter_registration_hook(count)
nn_module.register_module_buffer_registration_hook(count)

# Whether there are hooks for all modules, as of profilers. It is private: if it is gone, everything runs plain.
any_global_hook: Any = getattr(nn_module, "_has_any_global_hook", lambda: True)


def accelerate(model: Llama, samples: int = 1) -> str | None:
    """From now on, C computes the tokens after a prompt, for so many samples. Returns why it cannot, or None."""
    reason = load()[1] or difference(model)
    if not reason and model.lm_head.weight.dtype not in BOUNDS:
        reason = "fast/ needs --dtype float32 or bfloat16"
    elif not reason and samples > MAX_BATCH:
        reason = f"for more than {MAX_BATCH} samples torch is faster"
    elif not reason and not agrees(model):
        reason = "model.py computes something else than fast/"
    if not reason:
        model.__class__ = FastLlama
    return reason


@torch.inference_mode()
def agrees(model: Llama) -> bool:
    """Whether C computes what model.py does, which may have been edited: the logits of the last of two tokens."""
    dtype, cache = model.lm_head.weight.dtype, Cache(Llama.new_cache(model))
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="cpu")
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        expected = Llama.next_logits(model, tokens, Llama.new_cache(model)).float()
        Llama.next_logits(model, tokens[:, :1], cache)
        found = cache.next_logits(model, tokens[:, 1:])
    return found is not None and bool((found - expected).abs().max() <= BOUNDS[dtype] * expected.abs().max())


class FastLlama(Llama):
    def new_cache(self) -> "Cache":
        return Cache(super().new_cache())

    def next_logits(self, tokens: Tensor, cache: list[LayerCache]) -> Tensor:
        logits = cache.next_logits(self, tokens) if isinstance(cache, Cache) else None
        return super().next_logits(tokens, cache) if logits is None else logits


class Cache(list[LayerCache]):
    """The cache of `FastLlama`. `step` continues it: None before the first token, False if only plain code can."""

    step: Any = None

    def __reduce__(self) -> tuple:
        return Cache, (list(self),)  # a copy makes its own step

    def next_logits(self, model: Llama, tokens: Tensor) -> Tensor | None:
        if self.step is False or not self[0].length or not torch.is_inference_mode_enabled() or any_global_hook():
            return None
        if self.step is None or self.step.model is not model or self.step.stamp(self) != self.step.planned:
            self.step = plan(model, self)
        return self.step(tokens, self) if self.step else None


def product_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32


def difference(model: Llama) -> str | None:
    """The first module that is not as in a new pre-norm LLaMA with RMSNorm, in evaluation mode; None if all are."""
    found, expected = described(model), dict(reference(model.config))
    for name, module in found.items():
        if expected.pop(name, None) != module:
            module = str(model.get_submodule(name)).partition("\n")[0].removesuffix("(")
            return f"{name or 'the model'} is not supported: {module}"
    return f"{next(iter(expected))} is missing" if expected else None


def reference(config: ModelConfig) -> dict[str, Any]:
    """What is expected of a model's modules, with the sizes and the eps of `config`. It is kept, for every prompt."""
    if repr(config) not in REFERENCES:
        eps = config.norm_args.get("eps", 1e-6)
        sizes: dict[str, Any] = {"scaled_embedding": False, "embedding_scale": 1.0, "norm_args": {"eps": eps}}
        with torch.device("meta"):
            model = Llama(replace(config, norm="rmsnorm", placement="pre", qk_norm="none", **sizes)).eval()
        REFERENCES[repr(config)] = described(model)
    return REFERENCES[repr(config)]


def described(model: Llama) -> dict[str, Any]:
    """For each module its class, numbers and names, how many hooks and children it has, and its tensors' shapes."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        facts: dict[str, Any] = {name: tensor.shape for name, tensor in tensors}
        for name, value in vars(module).items():
            facts["." + name] = len(value) if isinstance(value, dict) else value if isinstance(value, NUMBERS) else None
        found[path] = Llama if type(module) is FastLlama else type(module), facts
    return found


def plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    kinds = Tensor, nn.Parameter
    contiguous = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
    return contiguous and tensor.dtype is dtype and type(tensor) in kinds


def plan(model: Llama, cache: Cache) -> "Step | bool":
    """The step that continues `cache`, or False if decode.c cannot."""
    if difference(model) or [type(kept) for kept in cache] != [LayerCache] * len(model.layers):
        return False
    config, dtype, layers = model.config, product_dtype(), []
    block: Any
    for block, kept in zip(model.layers, cache, strict=True):
        linears = [getattr(block.self_attn, f"{name}_proj") for name in ("q", "k", "v", "o")]
        linears += [getattr(block.mlp, f"{name}_proj") for name in ("gate", "up", "down")]
        norms = [block.attention_residual.norm.weight, block.mlp_residual.norm.weight]
        layers.append([*norms, *(linear.weight for linear in linears), kept.keys, kept.values])
    final_norm: Any = model.final_norm
    vectors = [model.embed_tokens.weight, model.rope.cos, model.rope.sin, final_norm.weight]
    shape = len(cache[0].keys), config.kv_heads, config.context, config.head_dim
    supported = (
        dtype in BOUNDS
        and shape[0] <= MAX_BATCH
        and all(tensor.shape == shape for layer in layers for tensor in layer[-2:])
        and all(plain(tensor, torch.float32) for tensor in chain(vectors, *(layer[:2] for layer in layers)))
        and all(plain(tensor, dtype) for tensor in chain([model.lm_head.weight], *(layer[2:] for layer in layers)))
    )
    return supported and Step(model, cache, [*vectors, model.lm_head.weight], layers)


class Step:
    """One token of each sequence: the table of sizes and pointers that decode.c reads, and what it was made from."""

    def __init__(self, model: Llama, cache: Cache, tensors: list[Tensor], layers: list[list[Tensor]]):
        self.model, config, self.batch = model, model.config, len(cache[0].keys)
        heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
        sizes = self.batch, config.layers, config.dim, heads, kv_heads, width, config.hidden_dim, config.context
        scores = heads * config.context
        scratch = config.dim, config.dim, heads * width, kv_heads * width, kv_heads * width, heads * width, scores
        buffers = [tensors[0].new_empty(self.batch * size) for size in (*scratch, config.hidden_dim)]
        # Detached, they keep the memory alive if a parameter's data is replaced.
        self.tensors = [tensor.detach() for tensor in (*tensors, *buffers, *chain(*layers))]
        values = [tensors[-1].dtype is torch.bfloat16, *sizes, config.vocab_size, *map(Tensor.data_ptr, self.tensors)]
        self.table, self.eps = (ctypes.c_int64 * len(values))(*values), model.final_norm.eps
        library: Any = load()[0]
        self.decode = library.decode
        self.weights = [*tensors, *chain(*(layer[:-2] for layer in layers))]
        self.planned = self.stamp(cache)

    def stamp(self, cache: Cache) -> tuple:
        """Changes when a hook is added, or a module, a weight or the cache is replaced. Values may change in place."""
        pointers = [
            *map(Tensor.data_ptr, self.weights),
            *(x.data_ptr() for kept in cache for x in (kept.keys, kept.values)),
        ]
        lengths = {kept.length for kept in cache}
        return RemovableHandle.next_id, registrations[0], pointers, len(lengths), product_dtype(), self.model.training

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor | None:
        """Logits (B, V) after `tokens` (B, 1), or None if C does not take them."""
        seen, tokens = cache[0].length, tokens.contiguous()
        if not plain(tokens, torch.int64) or tokens.shape != (self.batch, 1) or seen >= cache[0].context:
            return None
        logits = self.weights[0].new_empty(self.batch, self.model.config.vocab_size)  # fp32
        if not self.decode(self.table, self.eps, seen, tokens.data_ptr(), logits.data_ptr()):
            return None
        for kept in cache:
            kept.length += 1
        return logits
