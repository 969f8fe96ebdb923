"""The norms with statistics in one pass over memory, on a CPU, by kernels.c; anywhere else by their formulas."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from native import library
from norms.job import KERNELS, Job, call, job_for, padded

_formula_only = False


class Statistics(NamedTuple):
    """Which rows of a tensor are divided by what: n = r · x, r = 1 / sqrt(max(mean(x²) + eps, floor))."""

    shape: tuple[int, ...]  # of a row, the trailing axes
    eps: float = 0.0
    floor: float = 0.0
    first: int | None = None  # features in the mean (default: all)
    centred: bool = False  # whether the row's mean is subtracted first

    def job(self, x: Tensor, weight: Any) -> Job:
        width, (_, *rest) = math.prod(self.shape), self
        groups = 1 if weight is None else weight.numel() // width
        return job_for(x.numel() // width, width, groups, x.dtype, *rest)


def normalise(formula: Callable, statistics: Statistics, x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    """`formula(x, weight, bias)`, which is n · weight + bias with such statistics.

    By the kernel for fp32 and bf16 on a CPU, with parameters in fp32. Gain and bias are of the row's shape, or have
    an axis more: then they take turns, as the rows along that axis of x do. Only what is centred has a bias.
    """
    if not fits(statistics, x, weight, bias):
        return formula(x, weight, bias)
    if not torch.is_grad_enabled():
        return forward(statistics, x, weight, bias)
    return Normalise.apply(formula, statistics, x, weight, bias)


def fits(statistics: Statistics, x: Tensor, *parameters: Any) -> bool:
    """Whether the kernel can do it: Inductor fuses a formula by itself, and functorch wants to look into it."""
    return (
        not (torch.compiler.is_compiling() or _formula_only or torch._C._are_functorch_transforms_active())
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.device.type == "cpu"
        and type(x) in (Tensor, nn.Parameter)
        and x.shape[-len(statistics.shape) :] == statistics.shape
        and not any(p is not None and (p.dtype != torch.float32 or p.device.type != "cpu") for p in parameters)
        and x.numel() > 0
        and library(KERNELS)[0] is not None
    )


def in_use() -> str:
    """What computes fp32 and bf16 on a CPU here, in a few words."""
    kernels, how = library(KERNELS)
    return how if kernels else f"formulas, as {how}"


@contextmanager
def formula_only() -> Iterator[None]:
    """Without the kernel, to compare."""
    global _formula_only
    before, _formula_only = _formula_only, True
    try:
        yield
    finally:
        _formula_only = before


class Normalise(torch.autograd.Function):
    """n · weight + bias and its gradients. Saves x, which is there anyway, and computes n again."""

    @staticmethod
    def forward(ctx: Any, formula: Callable, statistics: Statistics, x: Tensor, weight: Any, bias: Any) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.formula, ctx.statistics = formula, statistics
        return forward(statistics, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        inputs = x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody is going to differentiate the gradients
            wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
            found = torch.autograd.grad(ctx.formula(*inputs), wanted, grad_y, create_graph=True)
            grads = dict(zip(map(id, wanted), found, strict=True))
            return None, None, *(grads.get(id(tensor)) for tensor in inputs)
        job = ctx.statistics.job(x, weight)
        x, grad_y, gains = x.contiguous(), grad_y.contiguous(), padded(weight, job.width)
        grad_x, room = torch.empty_like(x), torch.empty(job.chunks * 2 * (job.stride + gains.numel()))
        sums = torch.empty(job.chunks, 2, job.groups, job.stride, dtype=torch.float64)
        call("backward", job, x, grad_y, gains, grad_x, sums, room)
        grad_weight, grad_bias = sums[0, :, :, : job.width].float()
        return (
            *(None, None, grad_x),
            None if weight is None else grad_weight.view_as(weight),
            None if bias is None else grad_bias.view_as(bias),
        )


def forward(statistics: Statistics, x: Tensor, weight: Any, bias: Any) -> Tensor:
    job, x = statistics.job(x, weight), x.contiguous()
    biases = None if bias is None else padded(bias, job.width)
    y, room = torch.empty_like(x), torch.empty(job.chunks * job.stride)
    call("forward", job, x, padded(weight, job.width), biases, y, room)
    return y
