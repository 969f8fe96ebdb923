"""One more token of each sequence, by decode.c on a CPU: what it costs is to read every weight once, and little else.

Shapes: B sequences, H query heads, K heads of keys and values, D features of a head, S positions of a cache.
"""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from native import library

SOURCE = Path(__file__).with_suffix(".c")


def in_use() -> str:
    """What computes one more token on a CPU here, in a few words."""
    kernels, how = library(SOURCE)
    return how if kernels else f"PyTorch, as {how}"


@lru_cache(maxsize=1)
def functions() -> tuple:
    """`product` and `attend` of decode.c, or None for both where it cannot be built."""
    kernels, _ = library(SOURCE)
    if kernels is None:
        return None, None
    kernels.product.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 2]
    kernels.attend.argtypes = [ctypes.c_void_p] * 10
    kernels.product.restype = kernels.attend.restype = None
    return kernels.product, kernels.attend


def available() -> bool:
    return functions()[0] is not None


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
        self.address, self.function = ctypes.addressof(self.job), functions()[0]

    def __call__(self, x: Tensor) -> Tensor:
        x, y = x.contiguous(), torch.empty(*x.shape[:-1], self.outputs)
        self.function(self.address, x.numel() // self.inputs, x.data_ptr(), y.data_ptr())
        return y


# --- attention -------------------------------------------------------------------------------------------------------


class AttentionJob(ctypes.Structure):
    """The `Attention` of decode.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "head_dim", "context", "length")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        ("scale", ctypes.c_float),
    ]


def fits(q: Tensor, keys: Tensor) -> bool:
    """Whether `Attend` can do it: a single new position, in float32 on a CPU, of which no gradient is wanted."""
    return (
        q.shape[1] == 1
        and q.shape[0] == keys.shape[0]
        and q.dtype == keys.dtype == torch.float32
        and q.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and available()
    )


class Attend:
    """Attention of one more position, q B 1 H D, k and v B 1 K D, to itself and all before it; B 1 H·D.

    q and k are turned by the angles of `rope` first; k and v become number `seen` of keys and values, B K S D.
    """

    def __init__(self, keys: Tensor, values: Tensor, heads: int):
        batch, kv_heads, context, head_dim = keys.shape
        self.keys, self.values, self.shape = keys, values, (batch, 1, heads * head_dim)
        self.room = torch.empty(batch * heads * (head_dim + context + 16))
        self.job = AttentionJob(batch, heads, kv_heads, head_dim, context, scale=head_dim**-0.5)
        self.address, self.function = ctypes.addressof(self.job), functions()[1]
        self.addresses = keys.data_ptr(), values.data_ptr(), self.room.data_ptr()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor], seen: int) -> Tensor:
        (cos, sin), (keys, values, room), y = rope, self.addresses, torch.empty(self.shape)
        q, k, v, job = heads_together(q), heads_together(k), heads_together(v), self.job
        job.length, job.q_stride, job.k_stride, job.v_stride = seen, q.stride(0), k.stride(0), v.stride(0)
        new = q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr()
        self.function(self.address, *new, keys, values, y.data_ptr(), room)
        return y


def heads_together(x: Tensor) -> Tensor:
    """The same with the heads of a sequence one after the other in memory, whatever lies between sequences."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()
