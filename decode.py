"""One more token of each sequence, by decode.c on a CPU: what it costs is to read every weight once, and little else.

A block calls C twice, since what happens between two calls takes as long as a few matrices: the caches of the processor
are full of weights by then. Shapes: B sequences, C features of the stream, H query heads, K heads of keys and values,
D features of a head.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from native import function, library

SOURCE = Path(__file__).with_suffix(".c")


def in_use() -> str:
    """What computes one more token on a CPU here, in a few words."""
    loaded, how = library(SOURCE)
    return how if loaded else f"PyTorch, as {how}"


def available() -> bool:
    return library(SOURCE)[0] is not None


# --- products --------------------------------------------------------------------------------------------------------


class ProductJob(ctypes.Structure):
    """The `Product` of decode.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "bits")),
        *((name, ctypes.c_void_p) for name in ("weight", "steps")),
    ]


class Product:
    """x Wᵀ in float32 for a few rows x, W (outputs, inputs) in float32, bfloat16, or int8 times `steps`, one a row."""

    def __init__(self, weight: Tensor, steps: Tensor | None = None):
        self.weight = weight.contiguous()
        self.steps = None if steps is None else steps.float().contiguous()
        self.outputs, self.inputs = weight.shape
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in (self.weight, self.steps))
        self.job = ProductJob(self.outputs, self.inputs, 8 * weight.itemsize, *addresses)
        self.address, self.function = ctypes.addressof(self.job), function(SOURCE, "product", "pipp")

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32 and x.is_cpu
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], self.outputs)
        self.function(self.address, x.numel() // self.inputs, x.data_ptr(), y.data_ptr())
        return y


# --- attention and MLP ------------------------------------------------------------------------------------------------


class AttentionJob(ctypes.Structure):
    """The `Attention` of decode.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim")),
        ("scale", ctypes.c_float),
    ]


class Attention:
    """`module`, a model's attention, by C for one more token of each sequence; for more tokens `module` itself.

    All of it in one call for up to `most` sequences, the products by `qkv` and `out` (`most` is 0 where a norm comes
    between them); otherwise what is between the products of `module`.
    """

    def __init__(self, module: Any, qkv: Product, out: Product, most: int):
        self.module, self.products, self.most = module, (qkv, out), most
        heads = out.inputs // module.head_dim
        sizes = heads, (qkv.outputs // module.head_dim - heads) // 2, module.head_dim, module.head_dim**-0.5
        self.whole, self.inner = AttentionJob(qkv.address, out.address, *sizes), AttentionJob(None, None, *sizes)
        self.function = function(SOURCE, "attention", "piiipppppp")

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Any = None) -> Tensor:
        if cache is None or cache.length == 0 or x.shape[1] > 1:
            return self.module(x, rope, cache)
        y = torch.empty_like(x)
        if x.shape[0] <= self.most:
            return self.one_more(self.whole, x, rope, cache, y)
        heads = torch.cat(self.module.heads(x), 2)  # B 1 H+2K D
        return self.module.o_proj(self.one_more(self.inner, heads, rope, cache, y))

    def one_more(self, job: AttentionJob, x: Tensor, rope: tuple[Tensor, Tensor], cache: Any, y: Tensor) -> Tensor:
        """y, filled, and a position more of the cache."""
        (cos, sin), keys, values = rope, cache.keys, cache.values
        batch, _, context, _ = keys.shape
        assert x.is_contiguous() and x.dtype == keys.dtype == torch.float32 and x.shape[0] == batch
        given = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), keys.data_ptr(), values.data_ptr(), y.data_ptr()
        self.function(ctypes.addressof(job), batch, context, cache.length, *given)
        cache.length += 1
        return y


class MLP:
    """`module`, a model's MLP, in one call of C for one more token of up to `most` sequences; else `module` itself."""

    def __init__(self, module: Any, gate_up: Product, down: Product, most: int):
        self.module, self.products, self.most = module, (gate_up, down), most
        self.addresses, self.function = (gate_up.address, down.address), function(SOURCE, "mlp", "ppipp")

    def __call__(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        if length > 1 or rows > self.most:
            return self.module(x)
        assert x.is_contiguous() and x.dtype == torch.float32
        y = torch.empty_like(x)
        self.function(*self.addresses, rows, x.data_ptr(), y.data_ptr())
        return y
