"""One new token of each of a few sequences, in inference mode: the parts of the model that use the kernels.

Decoding is memory-bound: each token reads every weight once. Weights are fp32 or bf16, everything else fp32. A function
returns None if the kernels do not support a module or its tensors; `model.py` then computes it.

Shapes: B sequences, C features, H query heads, K heads of keys and values, D features of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fast.native import PADDING, kernels, supported
from model import Attention, LayerCache, Linear, Llama, RopeTable, SwiGLU

MAX_ROWS = {torch.float32: 32, torch.bfloat16: 16}  # tokens, by weight; torch's products are faster for more


class FastAttention(Attention):
    def forward(self, x: Tensor, rope: RopeTable, cache: LayerCache | None = None) -> Tensor:
        y = None if cache is None else attention(self, x, rope, cache)
        return super().forward(x, rope, cache) if y is None else y


class FastSwiGLU(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        y = mlp(self, x)
        return super().forward(x) if y is None else y


class FastLlama(Llama):
    def next_logits(self, tokens: Tensor, cache: list[LayerCache]) -> Tensor:
        x = self.hidden(tokens, cache)[:, -1]  # B C
        y = linear(x, self, "lm_head")
        return self.lm_head(x) if y is None else y  # B V


def unchanged(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a call of `module` is `kind.forward` and nothing else: no LoRA, parametrization or hooks."""
    if type(module) is not kind or module._forward_hooks or module._forward_pre_hooks:
        return False
    return "forward" not in module.__dict__


def weights_of(x: Tensor, module: nn.Module, names: tuple[str, ...], *others: Tensor) -> list[Any] | None:
    """The weights, of one dtype, of the named linear modules inside `module`; None if the kernels do not support
    them, `others`, or the product with the rows of x, or if there is a bias or dropout.
    """
    children: dict[str, Any] = module._modules
    if "dropout" in children and (not unchanged(children["dropout"], nn.Dropout) or children["dropout"].training):
        return None
    linears = [children[name] for name in names]
    if not all(unchanged(linear, Linear) and linear.bias is None for linear in linears):
        return None
    weights = [linear.weight for linear in linears]
    dtype = weights[0].dtype
    if not supported(x, *weights, *others) or any(weight.dtype is not dtype for weight in weights):
        return None
    if x.dtype is not torch.float32 or not 0 < x.numel() <= MAX_ROWS[dtype] * x.shape[-1]:
        return None
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is not dtype:
        return None
    return weights


def linear(x: Tensor, module: nn.Module, name: str) -> Tensor | None:
    """The linear module of that name, applied to x."""
    weights = weights_of(x, module, (name,))
    if weights is None or weights[0].shape[1] != x.shape[-1]:
        return None
    outputs, inputs = weights[0].shape
    y = x.new_empty(*x.shape[:-1], outputs)
    pointers = x.data_ptr(), weights[0].data_ptr(), y.data_ptr()
    kernels().linear(x.numel() // inputs, inputs, outputs, weights[0].dtype is torch.bfloat16, *pointers)
    return y


def mlp(module: nn.Module, x: Tensor) -> Tensor | None:
    """down(silu(gate(x)) · up(x))."""
    weights = weights_of(x, module, ("gate_proj", "up_proj", "down_proj"))
    if weights is None:
        return None
    gate, up, down = weights
    (hidden, inputs), outputs = gate.shape, len(down)
    if (x.shape[-1], up.shape, down.shape[1]) != (inputs, gate.shape, hidden):
        return None
    rows = x.numel() // inputs
    y, scratch = x.new_empty(*x.shape[:-1], outputs), x.new_empty(2 * rows * hidden)
    pointers = (tensor.data_ptr() for tensor in (x, *weights, scratch, y))
    kernels().mlp(rows, inputs, hidden, outputs, gate.dtype is torch.bfloat16, *pointers)
    return y


def attention(module: Any, x: Tensor, rope: RopeTable, cache: LayerCache) -> Tensor | None:
    """Attention of one new token, x B 1 C, to those in the cache and itself."""
    if type(cache) is not LayerCache or x.shape[1] != 1 or not 0 < cache.length < cache.context:
        return None
    if not (unchanged(module.rotated_q_norm, nn.Identity) and unchanged(module.rotated_k_norm, nn.Identity)):
        return None
    cached = cache.keys, cache.values, *rope
    weights = weights_of(x, module, ("q_proj", "k_proj", "v_proj", "o_proj"), *cached)
    if weights is None:
        return None
    (q_width, inputs), kv_width, outputs = weights[0].shape, len(weights[1]), len(weights[3])
    batch, dim, (cos, sin) = len(x), module.head_dim, rope
    heads, kv_heads = q_width // dim, kv_width // dim
    shapes = [(batch, 1, inputs), (heads * dim, inputs), *[(kv_heads * dim, inputs)] * 2, (outputs, heads * dim)]
    shapes += [*[(batch, kv_heads, cache.context, dim)] * 2, *[(1, dim // 2)] * 2]
    if [tensor.shape for tensor in (x, *weights, *cached)] != shapes or heads % kv_heads:
        return None
    if cache.keys.dtype is not cache.values.dtype or not cos.dtype is sin.dtype is torch.float32:
        return None
    bf16, q_size, kv_size = weights[0].dtype is torch.bfloat16, batch * q_width, batch * kv_width
    qkv, scratch = x.new_empty(q_size + 2 * kv_size), x.new_empty(batch * heads * (2 * dim + cache.context + PADDING))
    q, k, v = (qkv.data_ptr() + 4 * start for start in (0, q_size, q_size + kv_size))
    pointers = (tensor.data_ptr() for tensor in (x, *weights[:3]))
    kernels().project(batch, inputs, q_width, kv_width, bf16, *pointers, q, k, v)
    norms = module.q_norm, module.k_norm, module.v_norm
    if not all(unchanged(norm, nn.Identity) for norm in norms):
        parts = (part.view(batch, 1, -1, dim) for part in qkv.split((q_size, kv_size, kv_size)))
        normed = [norm(part).contiguous() for norm, part in zip(norms, parts, strict=True)]
        q, k, v = (part.data_ptr() for part in normed)
    y = x.new_empty(batch, 1, outputs)
    sizes = batch, heads, kv_heads, dim, cache.context, cache.length, outputs
    pointers = (tensor.data_ptr() for tensor in (cos, sin, cache.keys, cache.values, weights[3], scratch, y))
    kernels().attend(*sizes, cache.keys.dtype is torch.bfloat16, bf16, dim**-0.5, q, k, v, *pointers)
    cache.length += 1
    return y
