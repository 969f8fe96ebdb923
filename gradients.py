"""Gradients written by hand, of what PyTorch takes apart into many passes over memory; and gradients in less memory.

Each class is the plain formula that its docstring gives, to rounding. Shapes: B sequences, H heads, T tokens, D
features of a head; N tokens of a batch, C features of the stream, V token ids.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from native import library

LOGITS_AT_ONCE = 1 << 26  # 128 MB in bf16
CROSS_ENTROPY = Path(__file__).with_name("cross_entropy.c")
CHUNKS = 64  # of rows that a thread takes in one go


class Rotate(torch.autograd.Function):
    """(a, b) → (a cos − b sin, b cos + a sin) of the halves a and b of the last axis, in fp32 or more, then cast back.

    Its gradient is the rotation by the opposite angle.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.to(torch.promote_types(x.dtype, cos.dtype))
    a, b = h.chunk(2, dim=-1)
    y = h * torch.cat((cos, cos), dim=-1)
    front, back = y.chunk(2, dim=-1)
    front.addcmul_(b, sin, value=-1)
    back.addcmul_(a, sin)
    return y.to(x.dtype)


class CausalAttention(torch.autograd.Function):
    """softmax(q kᵀ / √D) v, each position seeing those up to itself; B H T D all.

    Forward as in `F.scaled_dot_product_attention`. The gradient computes the probabilities anew in plain products,
    which for bf16 on a CPU takes a third of the time that PyTorch's own needs, up to 20 times less for short sequences.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        shape, scale = grad.shape, grad.shape[-1] ** -0.5
        q, k, v, grad = (x.reshape(-1, *shape[-2:]) for x in (*ctx.saved_tensors, grad))
        future = torch.full((shape[-2], shape[-2]), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
        p = torch.baddbmm(future, q, k.mT, alpha=scale).softmax(-1)
        grad_s = torch.ops.aten._softmax_backward_data(grad @ v.mT, p, -1, p.dtype)
        grads = (grad_s @ k).mul_(scale), (grad_s.mT @ q).mul_(scale), p.mT @ grad
        return tuple(x.view(shape) for x in grads)


class LinearCrossEntropy(torch.autograd.Function):
    """Mean over N of −log softmax(h wᵀ)[target], in nats; h N C, w V C, targets N.

    The logits, by far the largest tensor of a step, are there for some rows at a time, and their gradient is formed on
    the spot, as in Liger (arXiv 2410.10989). Under autocast the products are in its format, the softmax in fp32.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, targets: Tensor, with_gradient: bool) -> Tensor:
        device = h.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
        loss = h.new_zeros((), dtype=torch.promote_types(h.dtype, torch.float32))
        rows, low_w = max(1, LOGITS_AT_ONCE // len(w)), w.to(dtype)
        grad_h, grad_w = (torch.empty_like(h), torch.zeros_like(w)) if with_gradient else (h, w)
        with torch.autocast(device, enabled=False):
            for start in range(0, len(h), rows):
                some = h[start : start + rows].to(dtype)
                losses, grad = cross_entropy(some @ low_w.T, targets[start : start + rows], loss.dtype)
                loss += losses.sum()
                if with_gradient:
                    grad_h[start : start + rows] = grad @ low_w
                    grad_w += grad.T @ some
        ctx.save_for_backward(grad_h, grad_w)
        return loss / len(h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_h, grad_w = ctx.saved_tensors
        scale = grad / len(grad_h)
        return grad_h * scale, grad_w * scale, None, None


def cross_entropy(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """−log softmax at the target of each row of logits (N, V), in `dtype`, and its gradient in theirs, in their place.

    By cross_entropy.c for fp32 and bf16 on a CPU.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16):
        kernels, _ = library(CROSS_ENTROPY)
        if kernels:
            losses, (rows, width) = torch.empty(len(logits)), logits.shape
            room = torch.empty(CHUNKS, -(-width // 16) * 16)
            addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (logits, targets, losses, room))
            sizes = map(ctypes.c_int64, (rows, width, CHUNKS))
            kernels.cross_entropy(*sizes, logits.dtype == torch.bfloat16, *addresses)
            return losses, logits
    log_p = torch.log_softmax(logits, -1, dtype=dtype)
    wanted = targets.unsqueeze(-1)
    losses = -log_p.gather(-1, wanted).squeeze(-1)
    return losses, log_p.exp_().scatter_add_(-1, wanted, -torch.ones_like(losses).unsqueeze(-1)).to(logits.dtype)


def recomputed(block: nn.Module, *args: Any) -> Any:
    """`block(*args)`, of which only the arguments are kept; the rest is computed again for the gradient.

    That is Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174. The second time, running statistics start
    from where they were the first time, and end where that left them.
    """
    before = [buffer.clone() for buffer in block.buffers()]

    @contextmanager
    def as_before() -> Iterator[None]:
        now = [buffer.clone() for buffer in block.buffers()]
        put(before)
        try:
            yield
        finally:
            put(now)

    @torch.no_grad()
    def put(values: list[Tensor]) -> None:
        for buffer, value in zip(block.buffers(), values, strict=True):
            buffer.copy_(value)

    return checkpoint(block, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), as_before()))
