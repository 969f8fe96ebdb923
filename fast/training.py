"""Gradients written by hand, of what PyTorch takes apart into many passes over memory; and gradients in less memory.

Each class is the plain formula that its docstring gives, to rounding. Shapes: B sequences, H heads, T tokens, D
features of a head; N tokens of a batch, C features of the stream, V token ids.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from native import function
from norms.calling import CHUNKS, LANES, NOTHING, call, room
from norms.calling import by_kernel as for_c
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 1 << 25  # 64 MB in bf16; more takes longer, and so does a quarter
ROWS = 64  # of logits, of which products want a multiple: 1048 take a third longer than 1024
SCORES_AT_ONCE = 1 << 22  # of attention, 8 MB in bf16
KERNELS = Path(__file__).with_suffix(".c")


def by_kernel(*tensors: Tensor) -> bool:
    """Whether gradients.c does it: for fp32 or bf16 on a CPU, all the same, where nobody looks into the computation."""
    return len({x.dtype for x in tensors}) == 1 and all(for_c(KERNELS, x) for x in tensors)


def sizes(x: Tensor) -> tuple[int, int, int]:
    """Rows, width, and whether it is in bf16."""
    return x.numel() // x.shape[-1], x.shape[-1], int(x.dtype == torch.bfloat16)


class Rotate(torch.autograd.Function):
    """(a, b) → (a cos − b sin, b cos + a sin) of the halves a and b of the last axis, in fp32 or more, then cast back.

    x is B T H D, cosines and sines T D/2. The gradient is the rotation by the opposite angle.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, sin, back=True), None, None


class Turn(ctypes.Structure):
    """The `Turn` of gradients.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "length", "heads", "half")),
        *((name, ctypes.c_int64 * 3) for name in ("source", "target")),
        *(("bf16", ctypes.c_int64), ("sign", ctypes.c_float)),
    ]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    batch, length, heads, width = x.shape
    tables = cos.shape == sin.shape == (length, width // 2) and cos.dtype == sin.dtype == torch.float32 and cos.is_cpu
    if tables and by_kernel(x) and x.stride(-1) == 1:
        y = x.new_empty(batch, heads, length, width).transpose(1, 2)  # as attention wants it
        turn = turn_for(x.shape, x.stride(), y.stride(), x.dtype == torch.bfloat16, -1 if back else 1)
        call(KERNELS, "rotate", (turn,), x, cos.contiguous(), sin.contiguous(), y)
        return y
    cos, sin = (table.unsqueeze(1) for table in (cos, -sin if back else sin))  # T 1 D/2
    a, b = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@lru_cache(maxsize=64)
def turn_for(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...], bf16: bool, sign: int) -> Turn:
    *sizes, width = shape
    return Turn(*sizes, width // 2, source[:3], target[:3], bf16, sign)


class GatedSiLU(torch.autograd.Function):
    """silu(gate) · up of x = (gate, up), side by side in the last axis, with one rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        call(KERNELS, "swiglu", sizes(y), x, NOTHING, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        call(KERNELS, "swiglu", sizes(grad), x, grad.contiguous(), grad_x)
        return grad_x


def gated_silu(x: Tensor) -> Tensor:
    """silu(gate) · up of x = (gate, up), side by side in the last axis, in the dtype of x."""
    one_token = not torch.is_grad_enabled() and x.numel() < 1 << 17  # over before the kernel has been called
    if one_token or not by_kernel(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    return GatedSiLU.apply(x)


class CausalAttention(torch.autograd.Function):
    """softmax(q kᵀ / √D) v, each position seeing those up to itself; B H T D all.

    Forward as in `F.scaled_dot_product_attention`. The gradient computes the probabilities anew in plain products, for
    some heads at a time: for bf16 on a CPU a quarter of the time that PyTorch's own needs, or less.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, ...]:
        grads = [x.new_empty(x.shape) for x in ctx.saved_tensors]
        for q, k, v, y, grad_q, grad_k, grad_v in some_heads(*ctx.saved_tensors, grad_y, *grads):
            p, grad_s = causal_softmax(q @ k.mT, y @ v.mT, q.shape[-1] ** -0.5)
            torch.bmm(grad_s, k, out=grad_q)
            torch.bmm(grad_s.mT, q, out=grad_k)
            torch.bmm(p.mT, y, out=grad_v)
        return tuple(grads)


def some_heads(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each of B H T D as heads T D, as many at a time as SCORES_AT_ONCE has room for."""
    heads = max(1, SCORES_AT_ONCE // tensors[0].shape[2] ** 2)
    return zip(*(x.reshape(-1, *x.shape[2:]).split(heads) for x in tensors), strict=True)


def causal_softmax(scores: Tensor, grad: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """p = softmax(scale · scores) of what comes before, (heads, T, T); and from the gradient of p that of the scores.

    Both inputs may be overwritten.
    """
    if by_kernel(scores, grad):
        given = *scores.shape[:2], scores.dtype == torch.bfloat16, scale, scores.data_ptr(), grad.data_ptr()
        function(KERNELS, "causal_softmax", "iiifpp")(*given)
        return scores, grad
    future = torch.full_like(scores[0], -torch.inf).triu(1)
    p = torch.add(future, scores, alpha=scale).softmax(-1)
    return p, torch.ops.aten._softmax_backward_data(grad, p, -1, p.dtype) * scale


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
        wt = w.T if w.dtype == dtype else transposed([w], dtype)  # C V
        rows, grad_h, grads_wt = rows_at_once(len(w)), torch.empty_like(h), []
        with torch.autocast(device, enabled=False):
            for start in range(0, max(1, len(h)), rows):
                some = h[start : start + rows].to(dtype)
                losses, grad = cross_entropy(some @ wt, targets[start : start + rows], loss.dtype)
                loss += losses.sum()
                if with_gradient:
                    grad_h[start : start + rows] = grad @ wt.T
                    grads_wt.append(transposed([some], dtype) @ grad)
                if len(grads_wt) == 3:  # two are left: the last one, and the sum of those before, in all bits
                    grads_wt[:2] = [grads_wt[0].to(w.dtype).add_(grads_wt[1])]
        ctx.save_for_backward(grad_h, *grads_wt)
        return loss / len(h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_h, *grads_wt = ctx.saved_tensors
        scale = grad / len(grad_h)
        return grad_h * scale, transposed(grads_wt, grad_h.dtype, scale), None, None


def rows_at_once(ids: int) -> int:
    """How many rows of logits, so many in each, are there at a time."""
    rows = max(1, LOGITS_AT_ONCE // ids)
    return rows - rows % ROWS or rows


def transposed(terms: list[Tensor], dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """The columns of scale · (the sum of one or two matrices) as rows, in `dtype`.

    The kernel lays them out in that order: from there, bf16 products on a CPU take 0.6 to 0.9 of the time.
    """
    if dtype in (torch.float32, torch.bfloat16) and all(for_c(KERNELS, x, scale) for x in terms):
        x, more = (*(x.contiguous() for x in terms), NOTHING)[:2]
        y = x.new_empty(x.shape[::-1], dtype=dtype)
        in_bf16 = (int(z.dtype == torch.bfloat16) for z in (x, more, y))
        call(KERNELS, "transpose", (*x.shape, *in_bf16), x, more, NOTHING if scale is None else scale, y)
        return y
    x, *others = terms
    if scale is None and not others:
        return x.to(dtype).T
    x = x.to(dtype, copy=True)
    for other in others:
        x += other
    return (x if scale is None else x.mul_(scale)).T


def cross_entropy(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """−log softmax at the target of each row of logits (N, V), in `dtype`; and in their place its gradient."""
    if by_kernel(logits) and len(logits):
        if len(targets) != len(logits) or targets.min() < 0 or targets.max() >= logits.shape[1]:
            raise IndexError(f"{len(logits)} targets from 0 to {logits.shape[1] - 1} are needed, one for each row")
        targets = targets.long().contiguous()
        losses, powers = room(len(logits)), room(CHUNKS, -(-logits.shape[1] // LANES) * LANES)
        call(KERNELS, "cross_entropy", (*sizes(logits), CHUNKS), logits, targets, losses, powers)
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

    if not before:
        return checkpoint(block, *args, use_reentrant=False)
    return checkpoint(block, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), as_before()))
