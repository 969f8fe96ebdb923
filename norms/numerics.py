"""Shared by all norms: precision and argument checks."""

import math

import torch
from torch import Tensor


def upcast(x: Tensor, *shape: int) -> Tensor:
    """x in the precision of statistics and gains: fp32, or float64 if x is float64.

    Raises ValueError unless x has floating-point numbers and, if `shape` is given, its last axes have these sizes.
    Sizes of 1 would broadcast, and integers would truncate the result.
    """
    if not x.is_floating_point():
        raise ValueError(f"a norm needs floating-point numbers, not {str(x.dtype).removeprefix('torch.')}")
    if shape and x.shape[-len(shape) :] != shape:
        expected = f"{shape[0]} features" if len(shape) == 1 else f"last axes {shape}"
        raise ValueError(f"a norm of {expected} cannot take the shape {tuple(x.shape)}")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_arguments(*sizes: int, eps: float = 1.0) -> None:
    """Raise ValueError unless every size is at least 1 and eps is positive and finite."""
    if not sizes or min(sizes) < 1:
        raise ValueError(f"a norm needs at least 1 feature, not {', '.join(map(str, sizes)) or 'none'}")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps of a norm must be positive and finite, not {eps}")
