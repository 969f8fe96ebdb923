"""Shared by all norms: precision, and the check of eps."""

import torch
from torch import Tensor

FP32 = torch.finfo(torch.float32)


def upcast(x: Tensor) -> Tensor:
    """x in the precision of statistics and gains: fp32, or float64 if x is float64.

    Raises ValueError for integers, which would truncate the result.
    """
    if not x.is_floating_point():
        raise ValueError(f"a norm needs floating-point numbers, not {str(x.dtype).removeprefix('torch.')}")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_eps(eps: float) -> None:
    """Raise ValueError unless eps is positive."""
    if not eps > 0:
        raise ValueError(f"eps of a norm must be positive, not {eps}")
