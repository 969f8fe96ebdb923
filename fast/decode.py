"""Generation with `decode.c`: after the prompt, one call of C computes a token of each sequence, in inference mode.

It serves the reference architecture, RMSNorm and pre-norm with sizes that are multiples of 16, in fp32 or with matrices
in bf16. Another norm, a hook, an adapter or code edited before `accelerate` runs plain, and so does everything except
`next_logits`. New hooks and replaced modules, weights and caches are noticed at the next token.
"""

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

from config import ModelConfig
from fast.native import load
from model import LayerCache, Llama

MAX_BATCH = 32  # torch's products are faster for more
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of differences that are rounding, by the matrices' dtype
NUMBERS = int, float, str  # attributes that are compared
REFERENCES: dict[str, dict[str, Any]] = {}
any_global_hook: Any = getattr(nn_module, "_has_any_global_hook", lambda: True)  # private: if gone, all runs plain

# The weights of a block in the order of decode.c: two vectors, then matrices.
PATHS = ["attention_residual.norm", "mlp_residual.norm", *(f"self_attn.{name}_proj" for name in "qkvo")]
PATHS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]

registrations = [0]  # of modules, parameters and buffers anywhere: one of an accelerated model may have been replaced


def count(*arguments: Any) -> None:
    registrations[0] += 1


for kind in ("module", "parameter", "buffer"):
    getattr(nn_module, f"register_module_{kind}_registration_hook")(count)


def accelerate(model: Llama, samples: int = 1) -> str | None:
    """From now on, C computes the tokens after a prompt, for so many samples. Returns why it cannot, or None."""
    if samples > MAX_BATCH:
        return f"for more than {MAX_BATCH} samples torch is faster"
    if reason := difference(model) or load(model.lm_head.weight.dtype)[1]:
        return reason
    if not agrees(model):
        return "model.py computes something else"
    model.__class__ = FastLlama
    return None


@torch.inference_mode()
def agrees(model: Llama) -> bool:
    """Whether C computes what model.py does, which may have been edited: the logits after a cache of noise."""
    config, dtype, cache = model.config, model.lm_head.weight.dtype, Cache(Llama.new_cache(model))
    tokens, generator = torch.zeros(1, 1, dtype=torch.int64, device="cpu"), torch.Generator("cpu").manual_seed(0)
    shape = 2, 1, config.kv_heads, min(config.context - 1, 64), config.head_dim
    for kept in cache:
        kept.extend(*torch.randn(shape, generator=generator, device="cpu").to(dtype))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        expected = Llama.next_logits(model, tokens, cache).float()
        for kept in cache:
            kept.length = shape[3]  # again, in the same memory
        found = cache.next_logits(model, tokens)
    return found is not None and bool((found - expected).abs().max() <= BOUNDS[dtype] * expected.abs().max())


class FastLlama(Llama):
    def new_cache(self) -> "Cache":
        return Cache(super().new_cache())

    def next_logits(self, tokens: Tensor, cache: list[LayerCache]) -> Tensor:
        logits = cache.next_logits(self, tokens) if isinstance(cache, Cache) else None
        return super().next_logits(tokens, cache) if logits is None else logits


class Cache(list[LayerCache]):
    """The cache of `FastLlama`, with the table of sizes and pointers that decode.c reads, if C can continue it."""

    step: Any = None  # the function of C, the table, eps and the memory that the table points to
    planned: Any = None  # the stamp when the table was made
    tensors: Any = ()  # that the table points to

    def __reduce__(self) -> tuple:
        return Cache, (list(self),)  # a copy makes its own table

    def next_logits(self, model: Llama, tokens: Tensor) -> Tensor | None:
        """Logits (B, V) after `tokens` (B, 1), or None if C does not compute them."""
        seen, config, tokens = self[0].length, model.config, tokens.contiguous()
        known = 0 < seen < config.context and {*map(type, self)} == {LayerCache}
        if not known or not torch.is_inference_mode_enabled() or any_global_hook():
            return None
        if self.stamp(model) != self.planned:
            self.plan(model)
            self.planned = self.stamp(model)
        step = self.step  # its memory stays, even if another thread plans
        if not step or not plain(tokens, torch.int64) or tokens.shape != (len(step[-1][-1]), 1):
            return None
        decode, table, eps, memory = step
        logits = memory[0].new_empty(len(tokens), config.vocab_size)
        if not decode(table, eps, seen, tokens.data_ptr(), logits.data_ptr()):
            return None
        for kept in self:
            kept.length += 1
        return logits

    def stamp(self, model: Llama) -> tuple:
        """Changes when a hook is added, or a module, a weight or the cache is replaced. Values may change in place."""
        cached = [(x.data_ptr(), x.shape, x.is_contiguous()) for kept in self for x in (kept.keys, kept.values)]
        memory = [*map(Tensor.data_ptr, self.tensors), *cached, len({kept.length for kept in self})]
        changes = RemovableHandle.next_id, registrations[0], [*map(id, model.layers)]
        return model, model.config, model.training, product_dtype(), changes, memory

    def plan(self, model: Any) -> None:
        """Fill in the table, or leave it empty if only plain code can continue."""
        config, dtype, batch = model.config, product_dtype(), len(self[0].keys)
        self.step, library = None, load(dtype)[0]
        shape = batch, config.kv_heads, config.context, config.head_dim
        known = all(kept.keys.shape == kept.values.shape == shape and kept.length == self[0].length for kept in self)
        if not library or batch > MAX_BATCH or not known or len(self) != config.layers or difference(model):
            return
        embedding, rope, norm, head = model.embed_tokens, model.rope, model.final_norm, model.lm_head
        self.tensors = tensors = [embedding.weight, rope.cos, rope.sin, norm.weight, head.weight]
        dtypes = [*4 * [torch.float32], dtype]
        for block, kept in zip(model.layers, self, strict=True):
            tensors += [*(block.get_parameter(f"{path}.weight") for path in PATHS), kept.keys, kept.values]
            dtypes += [*2 * [torch.float32], *9 * [dtype]]
        if not all(map(plain, tensors, dtypes)):
            return
        dim, queries, keys = config.dim, config.heads * config.head_dim, config.kv_heads * config.head_dim
        scratch = dim, queries, keys, keys, queries, config.heads * config.context, config.hidden_dim, config.hidden_dim
        buffers = [embedding.weight.new_empty(batch * size) for size in scratch]
        # Detached, they keep the memory alive if a parameter's data is replaced.
        memory = [tensor.detach() for tensor in (*buffers, *tensors)]
        sizes = batch, config.layers, dim, config.heads, config.kv_heads, config.head_dim, config.hidden_dim
        values = [*sizes, config.context, config.vocab_size, *map(Tensor.data_ptr, memory)]
        self.step = library.decode, (ctypes.c_int64 * len(values))(*values), norm.eps, memory


def difference(model: Llama) -> str | None:
    """The first module that is not as in a new pre-norm LLaMA with RMSNorm, in evaluation mode; None if all are."""
    config = model.config
    if any(size % 16 for size in (config.dim, config.head_dim, config.hidden_dim)):
        return "it needs --dim, --head-dim and --hidden-dim to be multiples of 16"
    found, expected = described(model), dict(reference(config))
    for name, module in found.items():
        if expected.pop(name, None) != module:
            module = str(model.get_submodule(name)).partition("\n")[0].removesuffix("(")
            return f"it does not support {name or 'the model'}: {module}"
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
    contiguous = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
    contiguous &= tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    return contiguous and tensor.dtype is dtype and type(tensor) in (Tensor, nn.Parameter)


def product_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
