"""The norms with statistics in one pass over memory, on a CPU, by kernels.c; anywhere else by their formulas."""

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from norms.kernels import library

_formula_only = False


class Statistics(NamedTuple):
    """Which rows of a tensor are divided by what: n = r · x, r = 1 / sqrt(max(mean(x²) + eps, floor))."""

    shape: tuple[int, ...]  # of a row, the trailing axes
    eps: float = 0.0
    floor: float = 0.0
    first: int | None = None  # features in the mean (default: all)
    centred: bool = False  # whether the row's mean is subtracted first


def normalise(formula: Callable, statistics: Statistics, x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    """`formula(x, weight, bias)`, which is n · weight + bias with such statistics.

    By the kernel for fp32 and bf16 on a CPU, with parameters in fp32. Gain and bias are of the row's shape, or have
    an axis more: then they take turns, as the rows along that axis of x do. Only what is centred has a bias.
    """
    if not fits(statistics, x, weight, bias):
        return formula(x, weight, bias)
    return Normalise.apply(formula, statistics, x, weight, bias)


def fits(statistics: Statistics, x: Tensor, *parameters: Any) -> bool:
    """Whether the kernel can do it: Inductor fuses a formula by itself, and functorch wants to look into it."""
    return (
        not (torch.compiler.is_compiling() or _formula_only or torch._C._are_functorch_transforms_active())
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.device.type == "cpu"
        and type(x) in (Tensor, nn.Parameter)
        and all(p is None or (p.dtype == torch.float32 and p.device.type == "cpu") for p in parameters)
        and x.shape[-len(statistics.shape) :] == statistics.shape
        and x.numel() > 0
        and library()[0] is not None
    )


def in_use() -> str:
    """What computes fp32 and bf16 on a CPU here, in a few words."""
    kernels, how = library()
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
        job = job_for(statistics, x, weight)
        gains, biases = padded(weight, job.width), None if bias is None else padded(bias, job.width)
        x = x.contiguous()
        y, room = torch.empty_like(x), torch.empty(job.chunks * job.stride)
        call("forward", job, x, gains, biases, y, room)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        inputs = x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody is going to differentiate the gradients
            wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
            found = torch.autograd.grad(ctx.formula(*inputs), wanted, grad_y, create_graph=True)
            grads = dict(zip(map(id, wanted), found, strict=True))
            return None, None, *(grads.get(id(tensor)) for tensor in inputs)
        job = job_for(ctx.statistics, x, weight)
        x, grad_y, gains = x.contiguous(), grad_y.contiguous(), padded(weight, job.width)
        grad_x, room = torch.empty_like(x), torch.empty(job.chunks * 2 * (job.stride + gains.numel()))
        sums = torch.empty(job.chunks, 2, *gains.shape, dtype=torch.float64)
        call("backward", job, x, grad_y, gains, grad_x, sums, room)
        grad_weight, grad_bias = sums[0, :, :, : job.width].float()
        return (
            *(None, None, grad_x),
            None if weight is None else grad_weight.view_as(weight),
            None if bias is None else grad_bias.view_as(bias),
        )


# --- what kernels.c is told ------------------------------------------------------------------------------------------

STEP = 32  # features, to a multiple of which it wants its gains padded
CHUNKS = 64  # into which rows are divided, at most: not by the number of threads, on which sums would then depend
SMALLEST = 16384  # features of a chunk, unless it is the last


class Job(ctypes.Structure):
    """The `Job` of kernels.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "width", "groups", "first", "chunk", "stride")),
        *((name, ctypes.c_int32) for name in ("centred", "bf16")),
        *((name, ctypes.c_float) for name in ("eps", "floor")),
    ]

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk)


def job_for(statistics: Statistics, x: Tensor, weight: Any) -> Job:
    width = math.prod(statistics.shape)
    return _job(statistics, width, x.numel() // width, 1 if weight is None else weight.numel() // width, x.dtype)


@lru_cache(maxsize=256)
def _job(statistics: Statistics, width: int, rows: int, groups: int, dtype: torch.dtype) -> Job:
    _, eps, floor, first, centred = statistics
    chunk, stride = max(-(-rows // CHUNKS), -(-SMALLEST // width)), -(-width // STEP) * STEP
    return Job(rows, width, groups, first or width, chunk, stride, centred, dtype == torch.bfloat16, eps, floor)


def padded(gains: Any, width: int) -> Tensor:
    """Gains or biases in rows of `width`, padded with zeros; ones where there are none."""
    gains = torch.ones(1, width) if gains is None else gains.detach().contiguous().view(-1, width)
    return gains if width % STEP == 0 else nn.functional.pad(gains, (0, -width % STEP))


def call(function: str, job: Job, *tensors: Any) -> None:
    kernels, _ = library()
    pointers = (ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors)
    getattr(kernels, function)(ctypes.byref(job), *pointers)
