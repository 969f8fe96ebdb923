"""How the norms call functions in C: when they may, with what, and how many rows at a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import Structure, addressof
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from native import function, library

LANES = 16  # features, to a multiple of which the C files want room for sums
CHUNKS = 64  # into which rows are divided, at most: not by the number of threads, on which sums would then depend
SMALLEST = 16384  # features of a chunk, unless it is the last

_formula_only = False
_noted = threading.local()  # its `calls`, where somebody listens


def by_kernel(source: Path, x: Tensor, *parameters: Any) -> bool:
    """Whether a C file is to be had, and x and parameters are of its kind: fp32 (x also bf16) on a CPU.

    Not under torch.compile, where Inductor fuses a formula by itself, nor for those who look into it: functorch,
    torch.jit.trace, forward-mode differentiation and `is_grads_batched`.
    """
    if (
        is_compiling()
        or _formula_only
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or not x.is_cpu
        or type(x) not in (Tensor, nn.Parameter)
        or is_legacy_batchedtensor(x)
    ):
        return False
    for tensor in parameters:
        if tensor is not None and (tensor.dtype != torch.float32 or not tensor.is_cpu):
            return False
    return (x.dtype == torch.float32 or x.dtype == torch.bfloat16) and library(source)[0] is not None


@contextmanager
def formula_only() -> Iterator[None]:
    """Without any C, to compare."""
    global _formula_only
    before, _formula_only = _formula_only, True
    try:
        yield
    finally:
        _formula_only = before


class Call(NamedTuple):
    """What was called in C: with these numbers and addresses, and `kept` at the latter."""

    function: Any
    given: list[int]
    kept: tuple


def call(source: Path, name: str, numbers: tuple[int | Structure, ...], *tensors: Tensor) -> None:
    """Call a function of a C file with whole numbers, addresses of structures, and contiguous tensors."""
    called = function(source, name, "i" * len(numbers) + "p" * len(tensors))
    given = [number if isinstance(number, int) else addressof(number) for number in numbers]
    given += map(Tensor.data_ptr, tensors)
    called(*given)
    if hasattr(_noted, "calls"):
        _noted.calls.append(Call(called, given, (numbers, tensors)))


@contextmanager
def noted() -> Iterator[list[Call]]:
    """The calls that this thread makes inside, to be made again."""
    calls: list[Call] = []
    _noted.calls = calls
    try:
        yield calls
    finally:
        del _noted.calls


def chunk_for(rows: int, width: int) -> int:
    """Rows that a thread does in one go."""
    return max(-(-rows // CHUNKS), -(-SMALLEST // width))


def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that holds nothing yet, where C can reach it, whatever the default device is."""
    return torch.empty(shape, dtype=dtype, device="cpu")


NOTHING = room(0)  # has address 0, which C takes for none


def differentiable(formula: Callable, inputs: Any, grad_y: Tensor) -> Iterator[Any]:
    """The gradients of `inputs`, by the formula, where somebody differentiates them or looks into them."""
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    with torch.enable_grad():
        y = formula(*inputs)
    found = torch.autograd.grad(y, wanted, grad_y, create_graph=torch.is_grad_enabled())
    grads = dict(zip(map(id, wanted), found, strict=True))
    return (grads.get(id(tensor)) for tensor in inputs)
