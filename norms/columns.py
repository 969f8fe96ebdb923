"""What norms over all tokens do with each feature, by columns.c: sums of columns, and columns scaled.

Tokens are (N, C), fp32 or bf16. What belongs to the features is (C,), and float64 where it was found here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from norms.calling import LANES, NOTHING, by_kernel, call, chunk_for, differentiable, room

KERNELS = Path(__file__).with_name("columns.c")
FEW = 16  # tokens, whose mean is usually near enough to that of all


def normalise(
    formula: Callable, x: Tensor, weight: Tensor, bias: Tensor, eps: float, *given: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`formula(x, weight, bias, *given)`: n · weight + bias, n = (x − mean) / sqrt(variance + eps); mean and variance.

    These are of x over all axes but the last, unless they are given.
    """
    if fits(x, weight, bias, *given):
        return NormaliseFeatures.apply(formula, x, weight, bias, eps, *given)
    return formula(x, weight, bias, *given)


def fits(x: Tensor, *parameters: Tensor) -> bool:
    """Whether columns.c can do it, x being (..., C) and each parameter (C,)."""
    shape = x.shape[-1:]
    return x.numel() > 0 and all(each.shape == shape for each in parameters) and by_kernel(KERNELS, x, *parameters)


class NormaliseFeatures(torch.autograd.Function):
    """What `normalise` says, with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, formula: Callable, x: Tensor, weight: Tensor, bias: Tensor, eps: float, *given: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1]).contiguous()
        mean, variance = (tensor.double() for tensor in given) if given else moments(tokens)
        r, rest = torch.rsqrt(variance + eps), mean - mean.float()
        y = combine(tokens, mean, r * weight, bias - rest * r * weight)
        ctx.save_for_backward(x, weight, bias, mean, r)
        ctx.formula, ctx.given = lambda *inputs: formula(*inputs, *given)[0], bool(given)
        ctx.nothing = (None,) * (1 + len(given))
        ctx.mark_non_differentiable(mean, variance)
        return y.view(x.shape), mean, variance

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Any) -> tuple[Any, ...]:
        x, weight, bias, mean, r = ctx.saved_tensors
        if torch.is_grad_enabled() or not by_kernel(KERNELS, grad_y):
            return None, *differentiable(ctx.formula, (x, weight, bias), grad_y), *ctx.nothing
        tokens, grads = (tensor.reshape(-1, x.shape[-1]) for tensor in (x, grad_y))
        scale, rest, zeros = r * weight, mean - mean.float(), torch.zeros_like(r)
        grad_bias, along = sums(tokens, mean, grads)
        grad_weight = r * (along - rest * grad_bias)
        if ctx.given:  # nothing of other tokens, not even 0 · NaN
            grad_x = combine(grads, zeros, scale, zeros)
        else:  # scale · (grad_y − mean(grad_y) − n · mean(grad_y · n))
            slope = -scale * r * grad_weight / len(tokens)
            grad_x = combine(tokens, mean, slope, -scale * grad_bias / len(tokens) - rest * slope, grads, scale)
        return None, grad_x.view(x.shape), grad_weight.float(), grad_bias.float(), *ctx.nothing


def moments(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance, by distances from a value of which a constant column's are exactly 0.

    Again from the mean itself, where that was so far away as to leave too few digits.
    """
    pivot = tokens[:FEW].double().mean(0).float()
    for _ in range(2):
        away, square = sums(tokens, pivot) / len(tokens)
        mean, variance = pivot + away, square - away * away
        if not (away * away > 3 * variance).any():
            break
        pivot = mean.float()
    return mean, variance.clamp_min(0)


def sums(x: Tensor, pivot: Tensor, v: Tensor | None = None) -> Tensor:
    """Σ v and Σ v · (x − pivot) of each feature, (2, C), or with x − pivot itself for v. Only where x `fits`."""
    rows, width, chunk, _ = sizes = sizes_for(x)
    found = room(-(-rows // chunk), 2, -(-width // LANES) * LANES, dtype=torch.float64)
    second = NOTHING if v is None else v.contiguous()
    call(KERNELS, "column_sums", sizes, x.contiguous(), single(pivot), second, found)
    return found[0, :, :width]


def combine(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, v: Any = None, gain: Any = None) -> Tensor:
    """(x − mean) · scale + shift, and + v · gain. Only where x `fits`."""
    x = x.contiguous()
    y, second = torch.empty_like(x), (NOTHING, NOTHING) if v is None else (v.contiguous(), single(gain))
    call(KERNELS, "combine", sizes_for(x), x, single(mean), single(scale), single(shift), *second, y)
    return y


def single(feature: Tensor) -> Tensor:
    """What belongs to the features, as columns.c reads it."""
    return feature.float().contiguous()


def sizes_for(x: Tensor) -> tuple[int, int, int, int]:
    rows, width = x.shape
    return rows, width, chunk_for(rows, width), int(x.dtype == torch.bfloat16)
