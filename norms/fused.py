"""The norms with statistics in one pass over memory, on a CPU, by kernels.c; anywhere else by their formulas."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from native import library
from norms.job import KERNELS, Job, Statistics, call, job_for

NO_BIAS = torch.empty(0)

_formula_only = False


def normalise(formula: Callable, statistics: Statistics, x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    """`formula(x, weight, bias)`, which is n · weight + bias with such statistics.

    By the kernel for fp32 and bf16 on a CPU, with parameters in fp32. Gain and bias are of the row's shape, or have
    an axis more: then they take turns, as the rows along that axis of x do. Only what is centred has a bias.
    """
    job = fits(statistics, x, weight, bias)
    if job is None:
        return formula(x, weight, bias)
    if not torch.is_grad_enabled():
        return forward(job, x, weight, bias)
    return Normalise.apply(formula, job, x, weight, bias)


def fits(statistics: Statistics, x: Tensor, weight: Any = None, bias: Any = None) -> Job | None:
    """What the kernel has to do; or None if it cannot: Inductor fuses a formula by itself, functorch looks into it."""
    if (
        is_compiling()
        or _formula_only
        or torch._C._are_functorch_transforms_active()
        or not x.is_cpu
        or type(x) not in (Tensor, nn.Parameter)
        or not (weight is None or (weight.dtype == torch.float32 and weight.is_cpu))
        or not (bias is None or (bias.dtype == torch.float32 and bias.is_cpu))
        or library(KERNELS)[0] is None
    ):
        return None
    return job_for(statistics, x.shape, x.dtype, None if weight is None else weight.numel())


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
    def forward(ctx: Any, formula: Callable, job: Job, x: Tensor, weight: Any, bias: Any) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.formula, ctx.job = formula, job
        return forward(job, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        inputs = x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody is going to differentiate the gradients
            wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
            found = torch.autograd.grad(ctx.formula(*inputs), wanted, grad_y, create_graph=True)
            grads = dict(zip(map(id, wanted), found, strict=True))
            return None, None, *(grads.get(id(tensor)) for tensor in inputs)
        job, x, weights = ctx.job, x.contiguous(), gains(weight, ctx.job, 1)
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weights)
        grad_bias = torch.empty_like(weights) if job.centred else NO_BIAS
        room = torch.empty(job.room, dtype=torch.float64)
        call("backward", job, x, grad_y.contiguous(), weights, grad_x, grad_weight, grad_bias, room)
        return (
            *(None, None, grad_x),
            None if weight is None else grad_weight.view_as(weight),
            None if bias is None else grad_bias.view_as(bias),
        )


def forward(job: Job, x: Tensor, weight: Any, bias: Any) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    call("forward", job, x, gains(weight, job, 1), gains(bias, job, 0) if job.centred else NO_BIAS, y)
    return y


def gains(given: Any, job: Job, default: float) -> Tensor:
    """Gains or biases as the kernel reads them, all `default` where there are none."""
    if given is None:
        return torch.full((job.groups * job.width,), default, dtype=torch.float32)
    return given.contiguous()
