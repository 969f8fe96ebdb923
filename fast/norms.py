"""The norms with statistics in one pass over memory, on a CPU, by kernels.c; anywhere else by their formulas."""

from collections.abc import Callable
from typing import Any

import torch
from native import library
from norms.calling import NOTHING, by_kernel, call, differentiable, room
from norms.job import KERNELS, Job, Statistics, job_for
from torch import Tensor


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
    """What the kernel has to do, or None if it cannot."""
    if not by_kernel(KERNELS, x, weight, bias):
        return None
    if weight is not None and bias is not None and weight.shape != bias.shape:
        return None
    given = bias if weight is None else weight
    return job_for(statistics, x.shape, x.dtype, None if given is None else given.shape)


def in_use() -> str:
    """What computes fp32 and bf16 on a CPU here, in a few words."""
    kernels, how = library(KERNELS)
    return how if kernels else f"formulas, as {how}"


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
        if torch.is_grad_enabled() or not by_kernel(KERNELS, grad_y):
            return None, None, *differentiable(ctx.formula, inputs, grad_y)
        job, x, weights = ctx.job, x.contiguous(), gains(weight, ctx.job, 1)
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weights)
        grad_bias = torch.empty_like(weights) if job.centred else NOTHING
        found, sums = (grad_x, grad_weight, grad_bias), room(job.doubles, dtype=torch.float64)
        call(KERNELS, "backward", (job,), x, grad_y.contiguous(), weights, *found, sums)
        return (
            *(None, None, grad_x),
            None if weight is None else grad_weight.view_as(weight),
            None if bias is None else grad_bias.view_as(bias),
        )


def forward(job: Job, x: Tensor, weight: Any, bias: Any) -> Tensor:
    x, weights, biases = x.contiguous(), gains(weight, job, 1), gains(bias, job, 0) if job.centred else NOTHING
    y = torch.empty_like(x)
    call(KERNELS, "forward", (job,), x, weights, biases, y)
    return y


def gains(given: Any, job: Job, default: float) -> Tensor:
    """Gains or biases as the kernel reads them, all `default` where there are none."""
    return room(job.groups * job.width).fill_(default) if given is None else given.contiguous()
