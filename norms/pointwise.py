"""curve(α · x + shift) · weight + bias, feature by feature, in one pass over memory, on a CPU, by pointwise.c."""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from norms.calling import LANES, by_kernel, call, chunk_for, differentiable, room

KERNELS = Path(__file__).with_name("pointwise.c")
PIECES, TERMS = 32, 7  # polynomials of a curve, and how many numbers each has


class Curve(NamedTuple):
    """An odd function that is 1 to float's last bit from `end` on, and its derivative; both on float64."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    end: float


TANH = Curve(torch.tanh, lambda u: 1 - torch.tanh(u) ** 2, 9.1)
ERF = Curve(torch.erf, lambda u: 2 / math.sqrt(math.pi) * torch.exp(-u * u), 4.2)


class Job(ctypes.Structure):
    """The `Job` of pointwise.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "width", "chunk", "bf16")),
        *((name, ctypes.c_void_p) for name in ("curve", "alpha", "shift", "weight", "bias")),
    ]
    pointed_at: list[Any]  # tensors that must live as long


@cache
def table(curve: Curve) -> Tensor:
    """The `Curve` of pointwise.c: in each piece, the polynomial that meets the curve at Chebyshev's points."""
    pieces, powers = (torch.arange(count, dtype=torch.float64, device="cpu") for count in (PIECES, TERMS))
    per_unit = (PIECES - 1) / curve.end
    at = torch.cos(math.pi * (powers + 0.5) / TERMS) / 2  # from a piece's middle
    u = (pieces + at[:, None]) / per_unit
    terms = torch.linalg.solve(at[:, None] ** powers, torch.cat([curve.value(u), curve.slope(u)], 1))
    values, slopes = terms.chunk(2, 1)
    values[::2, 0] = 0  # an odd function's polynomial around 0
    values[:, -1], slopes[:, -1], values[0, -1] = 0, 0, 1
    return torch.cat([values.flatten(), slopes.flatten(), at.new_tensor([per_unit])]).float()


def apply(
    formula: Callable, curve: Curve, x: Tensor, alpha: Tensor, shift: Any, weight: Tensor, bias: Tensor
) -> Tensor:
    """`formula(x, alpha, shift, weight, bias)`, which is curve(α · x + shift) · weight + bias. shift may be None."""
    fits = x.numel() and x.shape[-1:] == weight.shape == bias.shape
    scalars = alpha.numel() == 1 and (shift is None or shift.numel() == 1)
    if not (fits and scalars and by_kernel(KERNELS, x, alpha, shift, weight, bias)):
        return formula(x, alpha, shift, weight, bias)
    return Pointwise.apply(formula, curve, x, alpha, shift, weight, bias)


class Pointwise(torch.autograd.Function):
    """What `apply` says, and its gradients. Saves x, which is there anyway, and computes the curve again."""

    @staticmethod
    def forward(ctx: Any, formula: Callable, curve: Curve, x: Tensor, *parameters: Any) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.formula, ctx.curve = formula, curve
        x = x.contiguous()
        y, job = torch.empty_like(x), job_for(curve, x, *parameters)
        call(KERNELS, "forward", (job,), x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        inputs = x, _, shift, *_ = ctx.saved_tensors
        if torch.is_grad_enabled() or not by_kernel(KERNELS, grad_y):
            return None, None, *differentiable(ctx.formula, inputs, grad_y)
        x, job = x.contiguous(), job_for(ctx.curve, *inputs)
        stride, chunks = -(-job.width // LANES) * LANES, -(-job.rows // job.chunk)
        grad_x, sums = torch.empty_like(x), room(chunks, 4, stride, dtype=torch.float64)
        few = room(chunks, 2, stride)
        call(KERNELS, "backward", (job,), x, grad_y.contiguous(), grad_x, sums, few)
        grad_weight, grad_bias = sums[0, :2, : job.width].float()
        grad_alpha, grad_shift = sums[0, 2:, :LANES].sum(1, keepdim=True).float()
        return None, None, grad_x, grad_alpha, None if shift is None else grad_shift, grad_weight, grad_bias


def job_for(curve: Curve, x: Tensor, *parameters: Any) -> Job:
    width = x.shape[-1]
    rows = x.numel() // width
    tensors = [None if tensor is None else tensor.contiguous() for tensor in (table(curve), *parameters)]
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    job = Job(rows, width, chunk_for(rows, width), x.dtype == torch.bfloat16, *addresses)
    job.pointed_at = tensors
    return job
