"""One new token of each of a few sequences, without gradients.

Decoding is memory-bound: each token reads every weight once. Weights are fp32 or bf16, everything else fp32. A function
returns None if the kernels do not support a module or its tensors.

Shapes: B sequences, C features, H query heads, K heads of keys and values, D features of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from fast.native import PADDING, kernels, scratch, supported
from model import LayerCache, Linear, RopeTable

MAX_ROWS = {torch.float32: 32, torch.bfloat16: 16}  # tokens, by weight; torch's products are faster for more

# No public function says whether there are hooks for all modules. Without the private one, the kernels are not used.
any_global_hook = getattr(nn_module, "_has_any_global_hook", lambda: True)


def has_hooks(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks)


def is_identity(module: Any) -> bool:
    return type(module) is nn.Identity and not has_hooks(module)


def plain_weight(linear: nn.Module) -> Tensor | None:
    """The weight, if a call of `linear` is x Wᵀ and nothing else: no LoRA, parametrization, hooks or bias."""
    if type(linear) is not Linear or has_hooks(linear) or "forward" in linear.__dict__:
        return None
    parameters = linear._parameters
    return parameters.get("weight") if parameters.get("bias") is None else None


def weights_of(x: Tensor, module: nn.Module, names: tuple[str, ...], *others: Tensor) -> list[Any] | None:
    """The weights, of one dtype, of the named linear modules inside `module`; None if the kernels do not support
    them, `others`, or the product with the rows of x, or if gradients or dropout may be needed.
    """
    if torch.is_grad_enabled() or module.training or any_global_hook():
        return None
    if x.dtype is not torch.float32 or x.numel() == 0:
        return None
    weights: list[Any] = [plain_weight(module._modules[name]) for name in names]  # type: ignore[arg-type]
    if any(weight is None for weight in weights) or not supported(x, *weights, *others):
        return None
    dtype = weights[0].dtype
    if x.numel() > MAX_ROWS[dtype] * x.shape[-1]:
        return None
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is not dtype:
        return None
    return weights if all(weight.dtype is dtype and weight.is_contiguous() for weight in weights) else None


def linear(x: Tensor, module: nn.Module, name: str) -> Tensor | None:
    """The linear module of that name, applied to x."""
    weights = weights_of(x, module, (name,))
    if weights is None or weights[0].shape[1] != x.shape[-1]:
        return None
    x, (outputs, inputs) = x.contiguous(), weights[0].shape
    y = x.new_empty(*x.shape[:-1], outputs)
    pointers = x.data_ptr(), weights[0].data_ptr(), y.data_ptr()
    kernels().linear(x.numel() // inputs, inputs, outputs, weights[0].dtype is torch.bfloat16, *pointers)
    return y


def mlp(module: nn.Module, x: Tensor) -> Tensor | None:
    """down(silu(gate(x)) · up(x))."""
    weights = weights_of(x, module, ("gate_proj", "up_proj", "down_proj"))
    if weights is None:
        return None
    gate_weight, up_weight, down_weight = weights
    (hidden, inputs), outputs = gate_weight.shape, down_weight.shape[0]
    if up_weight.shape != (hidden, inputs) or down_weight.shape[1] != hidden or x.shape[-1] != inputs:
        return None
    x, rows = x.contiguous(), x.numel() // inputs
    y = x.new_empty(*x.shape[:-1], outputs)
    workspace = scratch(2 * rows * (hidden + PADDING))
    pointers = (tensor.data_ptr() for tensor in (x, *weights, workspace, y))
    kernels().mlp(rows, inputs, hidden, outputs, gate_weight.dtype is torch.bfloat16, *pointers)
    return y


def attention(module: Any, x: Tensor, rope: RopeTable, cache: LayerCache) -> Tensor | None:
    """Attention of one new token, x B 1 C, to those in the cache and itself."""
    if x.shape[1] != 1 or cache.length == 0:
        return None
    if not all(is_identity(module._modules[name]) for name in ("rotated_q_norm", "rotated_k_norm")):
        return None
    keys, values, (cos, sin) = cache.keys, cache.values, rope
    weights = weights_of(x, module, ("q_proj", "k_proj", "v_proj", "o_proj"), keys, values, cos, sin)
    if weights is None:
        return None
    q_weight, k_weight, v_weight, o_weight = weights
    (q_width, inputs), kv_width, outputs, dim = q_weight.shape, k_weight.shape[0], o_weight.shape[0], module.head_dim
    batch, heads, kv_heads = len(x), q_width // dim, kv_width // dim
    cache_shape, table = (batch, kv_heads, cache.context, dim), (1, dim // 2)
    if not (
        x.shape[-1] == inputs
        and k_weight.shape == v_weight.shape == (kv_heads * dim, inputs)
        and o_weight.shape[1] == q_width == heads * dim
        and heads % kv_heads == 0
        and keys.shape == values.shape == cache_shape
        and keys.dtype is values.dtype
        and cos.shape == sin.shape == table
        and cos.dtype is sin.dtype is torch.float32
        and keys.is_contiguous()
        and values.is_contiguous()
        and cache.length < cache.context
    ):
        return None
    x, bf16 = x.contiguous(), q_weight.dtype is torch.bfloat16
    q_size, kv_size = batch * q_width, batch * kv_width
    qkv, workspace = scratch(q_size + 2 * kv_size), scratch(batch * heads * (2 * dim + cache.context + PADDING))
    q, k, v = (qkv.data_ptr() + 4 * start for start in (0, q_size, q_size + kv_size))
    pointers = (tensor.data_ptr() for tensor in (x, q_weight, k_weight, v_weight))
    kernels().project(batch, inputs, q_width, kv_width, bf16, *pointers, q, k, v)
    norms = [module._modules[name] for name in ("q_norm", "k_norm", "v_norm")]
    if not all(map(is_identity, norms)):
        shape = batch, 1, -1, dim
        parts = (part.view(shape) for part in qkv.split((q_size, kv_size, kv_size)))
        normed = [norm(part).contiguous() for norm, part in zip(norms, parts, strict=True)]
        q, k, v = (part.data_ptr() for part in normed)
    y = x.new_empty(batch, 1, outputs)
    sizes = batch, heads, kv_heads, dim, cache.context, cache.length, outputs
    tensors = cos, sin, keys, values, o_weight, workspace, y
    scale, pointers = dim**-0.5, (tensor.data_ptr() for tensor in tensors)
    kernels().attend(*sizes, keys.dtype is torch.bfloat16, bf16, scale, q, k, v, *pointers)
    cache.length += 1
    return y
