"""Rotation, attention and loss of the model with hand-written gradients.

Shapes: B sequences, H heads, T tokens, D features of a head; N tokens of a batch, C features, V token ids.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import model
from fast.native import PADDING, formula_gradients, kernels, scratch, supported
from norms.numerics import upcast

LOGITS_AT_ONCE = 1 << 25  # 64 MB in bf16; four times as many or a quarter take longer
ROW_MULTIPLE = 64  # row counts that are multiples of 64 are faster: 1048 rows take a third longer than 1024
SCORES_AT_ONCE = 1 << 22  # of attention, 8 MB in bf16
CHUNKS = 64  # of rows of logits, each with its own scratch memory


# --- rotary positions ------------------------------------------------------------------------------------------------


def rotate(x: Tensor, rope: model.RopeTable) -> Tensor:
    """`model.rotate`, B T H D."""
    cos, sin = rope
    table = x.shape[1], x.shape[3] // 2
    fits = supported(x, cos, sin) and cos.dtype is sin.dtype is torch.float32 and cos.shape == sin.shape == table
    return Rotate.apply(x, cos, sin) if fits else model.rotate(x, rope)


class Rotate(torch.autograd.Function):
    """The gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_heads(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled() or not supported(grad):
            return model.rotate(grad, (cos, -sin)), None, None
        return rotate_heads(grad, cos, sin, -1), None, None


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    batch, length, heads, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = x.new_empty(batch, heads, length, width)  # the layout attention reads
    pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    sizes = batch, length, heads, width // 2, *x.stride()[:3]
    kernels().rotate_heads(*sizes, x.dtype is torch.bfloat16, sign, *pointers)
    return y.transpose(1, 2)


# --- attention -------------------------------------------------------------------------------------------------------


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, grouped: bool) -> Tensor:
    """softmax(q kᵀ / √D) v over the positions so far; B H T D, k and v with fewer heads if `grouped`."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.bfloat16
    in_bf16 = q.dtype is k.dtype is v.dtype is dtype is torch.bfloat16
    if in_bf16 and not dropout and torch.is_grad_enabled() and supported(q, k, v):
        if grouped:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return CausalAttention.apply(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True, enable_gqa=grouped)


def attention_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.full(q.shape[2:3] * 2, -torch.inf, dtype=q.dtype).triu(1)
    return (q @ k.mT * q.shape[-1] ** -0.5 + future).softmax(-1) @ v


class CausalAttention(torch.autograd.Function):
    """The backward pass recomputes the probabilities in plain matrix products, for some heads at a time. In bf16 on a
    CPU this takes a quarter of the time of torch's own.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled() or not supported(grad_y):
            return tuple(formula_gradients(attention_formula, inputs, grad_y))
        length, width = grad_y.shape[2:]
        grads = [x.new_empty(x.shape) for x in inputs]
        heads = max(1, SCORES_AT_ONCE // length**2)
        parts = (x.reshape(-1, length, width).split(heads) for x in (*inputs, grad_y, *grads))
        for q, k, v, y, grad_q, grad_k, grad_v in zip(*parts, strict=True):
            p, grad_scores = q @ k.mT, y @ v.mT  # scores and the gradient of p, which the kernel overwrites
            sizes = *p.shape[:2], p.dtype is torch.bfloat16, width**-0.5
            kernels().causal_softmax(*sizes, p.data_ptr(), grad_scores.data_ptr())
            torch.bmm(grad_scores, k, out=grad_q)
            torch.bmm(grad_scores.mT, q, out=grad_k)
            torch.bmm(p.mT, y, out=grad_v)
        return tuple(grads)


# --- the head and the loss -------------------------------------------------------------------------------------------


def targets_supported(targets: Tensor, tokens: Tensor, w: Tensor) -> bool:
    """Whether `targets` are token ids, one per token. Everything else, such as -100, falls back to the formula."""
    ids = targets.is_cpu and targets.dtype is torch.int64 and targets.shape == tokens.shape and targets.numel() > 0
    return ids and targets.min().item() >= 0 and targets.max().item() < len(w)


def linear_cross_entropy(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """Mean over N of -log softmax(h wᵀ)[target], in nats; h N C, w V C, targets N."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else h.dtype
    if not supported(h) or dtype not in (torch.float32, torch.bfloat16):
        return head_formula(h, w, targets)
    return LinearCrossEntropy.apply(h, w, targets, dtype, torch.is_grad_enabled())


def head_formula(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(upcast(F.linear(h, w)), targets)


class LinearCrossEntropy(torch.autograd.Function):
    """The logits, by far the largest tensor of a step, exist for some rows at a time, and their gradient is formed
    immediately, as in Liger (arXiv 2410.10989). Products are in `dtype`, softmax and sums in fp32.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, targets: Tensor, dtype: torch.dtype, backward: bool) -> Tensor:
        loss = h.new_zeros((), dtype=torch.float32)
        wt = w.T if w.dtype is dtype else transpose_sum([w], dtype)  # C V
        rows = max(1, LOGITS_AT_ONCE // len(w))
        rows = rows - rows % ROW_MULTIPLE or rows
        grad_h, grads_wt = torch.empty_like(h), []
        with torch.autocast("cpu", enabled=False):
            for start in range(0, len(h), rows):
                h_rows = h[start : start + rows].to(dtype)
                logits = h_rows @ wt
                loss += cross_entropy(logits, targets[start : start + rows]).sum()
                if backward:  # `logits` now holds its gradient
                    grad_h[start : start + rows] = logits @ wt.T
                    grads_wt.append(transpose_sum([h_rows], dtype) @ logits)
                if len(grads_wt) == 3:  # keep two: the sum so far in full precision, and the newest
                    grads_wt[:2] = [grads_wt[0].to(w.dtype).add_(grads_wt[1])]
        ctx.save_for_backward(h, w, targets, grad_h, *grads_wt)
        ctx.dtype = dtype
        return loss / len(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        h, w, targets, grad_h, *grads_wt = ctx.saved_tensors
        if torch.is_grad_enabled() or not supported(grad):
            with torch.autocast("cpu", ctx.dtype, enabled=ctx.dtype is torch.bfloat16):
                return *formula_gradients(head_formula, (h, w, targets), grad), None, None
        scale = grad / len(grad_h)
        return grad_h * scale, transpose_sum(grads_wt, w.dtype, scale), None, None, None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax at the target of each row of logits, (N, V), which is overwritten by its gradient."""
    rows, width = logits.shape
    targets = targets.contiguous()
    losses, exps = scratch(rows), scratch(CHUNKS, -(-width // PADDING) * PADDING)
    pointers = (x.data_ptr() for x in (logits, targets, losses, exps))
    kernels().cross_entropy(rows, width, logits.dtype is torch.bfloat16, CHUNKS, *pointers)
    return losses


def transpose_sum(terms: list[Tensor], dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """scale · (the sum of one or two matrices), transposed, in `dtype`, and contiguous: from that layout bf16 products
    on a CPU take 0.6 to 0.9 of the time.
    """
    x, *others = (term.contiguous() for term in terms)
    more = others[0] if others else None
    y = x.new_empty(x.shape[::-1], dtype=dtype)
    in_bf16 = (term is not None and term.dtype is torch.bfloat16 for term in (x, more, y))
    pointers = (None if term is None else term.data_ptr() for term in (x, more, scale, y))
    kernels().transpose_sum(*x.shape, *in_bf16, *pointers)
    return y
