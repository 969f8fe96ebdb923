"""What kernels.c is told of a call: sizes, and where the tensors lie."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from native import library

KERNELS = Path(__file__).with_name("kernels.c")
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


@lru_cache(maxsize=256)
def job_for(
    rows: int, width: int, groups: int, dtype: torch.dtype, eps: float, floor: float, first: int | None, centred: bool
) -> Job:
    chunk, stride = max(-(-rows // CHUNKS), -(-SMALLEST // width)), -(-width // STEP) * STEP
    return Job(rows, width, groups, first or width, chunk, stride, centred, dtype == torch.bfloat16, eps, floor)


def padded(gains: Any, width: int) -> Tensor:
    """Gains or biases in rows of `width`, padded with zeros; ones where there are none."""
    gains = torch.ones(width) if gains is None else gains.detach().contiguous()
    return gains if width % STEP == 0 else nn.functional.pad(gains.view(-1, width), (0, -width % STEP))


def call(function: str, job: Job, *tensors: Tensor | None) -> None:
    kernels, _ = library(KERNELS)
    addresses = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
    getattr(kernels, function)(ctypes.byref(job), *addresses)
