"""What kernels.c is told of a call besides the tensors: their sizes, and which statistics."""

import ctypes
import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from norms.calling import LANES, chunk_for

KERNELS = Path(__file__).with_name("kernels.c")


class Statistics(NamedTuple):
    """Which rows of a tensor are divided by what: n = r · x, r = 1 / sqrt(max(mean(x²) + eps, floor))."""

    shape: tuple[int, ...]  # of a row, the trailing axes
    eps: float = 0.0
    floor: float = 0.0
    first: int | None = None  # features in the mean (default: all)
    centred: bool = False  # whether the row's mean is subtracted first


class Job(ctypes.Structure):
    """The `Job` of kernels.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "width", "groups", "first", "chunk", "stride")),
        *((name, ctypes.c_int32) for name in ("centred", "bf16")),
        *((name, ctypes.c_float) for name in ("eps", "floor")),
    ]

    @property
    def doubles(self) -> int:
        """Numbers that `backward` wants to work in."""
        chunks = -(-self.rows // self.chunk)
        return chunks * (1 + self.centred) * self.groups * self.stride * 3 // 2


@lru_cache(maxsize=256)
def job_for(statistics: Statistics, shape: tuple[int, ...], dtype: torch.dtype, gains: tuple | None) -> Job | None:
    """For x of this shape and dtype, and gains of that shape; or None, where that is not for kernels.c to do."""
    axes, eps, floor, first, centred = statistics
    gains = gains or axes
    if shape[-len(axes) :] != axes or shape[-len(gains) :] != gains or len(gains) < len(axes) or 0 in shape:
        return None
    width = math.prod(axes)
    rows, groups = math.prod(shape) // width, math.prod(gains) // width
    chunk, stride = chunk_for(rows, width), -(-width // LANES) * LANES
    return Job(rows, width, groups, first or width, chunk, stride, centred, dtype == torch.bfloat16, eps, floor)
