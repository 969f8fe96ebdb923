"""RMSNorm and LayerNorm, forward and backward each in one pass over memory."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fast.native import PADDING, formula_gradients, kernels, scratch, supported
from norms.layernorm import LayerNorm
from norms.rmsnorm import RMSNorm

CHUNKS = 64  # at most; sums are formed chunk by chunk, so it must not depend on the number of threads
CHUNK_SIZE = 16384  # elements, at least


class FastRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if self.cast_order == "llama" or self.zero_centered:  # llama rounds twice, the kernel once
            return super().forward(x)
        y = normalize(x, self.weight, None, x.shape[-1:], self.eps, False)
        return super().forward(x) if y is None else y


class FastLayerNorm(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = normalize(x, self.weight, self.bias, self.normalized_shape, self.eps, True)
        return super().forward(x) if y is None else y


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float, centered: bool
) -> Tensor | None:
    """RMSNorm of x over the trailing axes `shape`, or LayerNorm if `centered`. None if unsupported."""
    for gain in (weight, bias):
        if gain is not None and (gain.dtype is not torch.float32 or gain.shape != shape):
            return None
    if x.shape[-len(shape) :] != shape or x.numel() == 0 or not supported(x, weight, bias):
        return None
    function = Normalize.apply if torch.is_grad_enabled() else normalize_forward
    return function(x, weight, bias, shape, eps, centered)


class Normalize(torch.autograd.Function):
    """Saves x and recomputes the statistics in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        centered: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.options = shape, eps, centered
        return normalize_forward(x, weight, bias, shape, eps, centered)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        inputs = x, weight, bias = ctx.saved_tensors
        shape, eps, centered = ctx.options
        if torch.is_grad_enabled() or not supported(grad_y):

            def formula(x: Tensor, weight: Any, bias: Any) -> Tensor:
                norm: Any = SimpleNamespace(
                    weight=weight, bias=bias, eps=eps, normalized_shape=shape, dim=shape[-1], cast_order="fp32",
                    zero_centered=False,
                )  # fmt: skip
                return (LayerNorm if centered else RMSNorm).forward(norm, x)

            return *formula_gradients(formula, inputs, grad_y), None, None, None
        x, grad_y, weights = x.contiguous(), grad_y.contiguous(), gain_or(1, weight, shape)
        rows, width, chunk = division(x, shape)
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weights)
        grad_bias = torch.empty_like(weights) if centered else grad_weight
        sums = scratch(-(-rows // chunk) * (1 + centered) * -(-width // PADDING) * PADDING * 3)
        pointers = (tensor.data_ptr() for tensor in (x, grad_y, weights, grad_x, grad_weight, grad_bias, sums))
        kernels().norm_backward(rows, width, chunk, centered, x.dtype is torch.bfloat16, eps, *pointers)
        grads = grad_x, None if weight is None else grad_weight, None if bias is None else grad_bias
        return *grads, None, None, None


def normalize_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float, centered: bool
) -> Tensor:
    x, weights = x.contiguous(), gain_or(1, weight, shape)
    biases = gain_or(0, bias, shape) if centered else weights
    y = torch.empty_like(x)
    pointers = x.data_ptr(), weights.data_ptr(), biases.data_ptr(), y.data_ptr()
    kernels().norm_forward(*division(x, shape), centered, x.dtype is torch.bfloat16, eps, *pointers)
    return y


def gain_or(default: float, gain: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    return scratch(*shape).fill_(default) if gain is None else gain.contiguous()


def division(x: Tensor, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Rows, their width, and how many rows a thread takes at a time."""
    width = math.prod(shape)
    rows = x.numel() // width
    return rows, width, max(-(-rows // CHUNKS), -(-CHUNK_SIZE // width))
