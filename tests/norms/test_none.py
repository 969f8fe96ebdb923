"""The identity."""

import torch
from torch import Tensor


def oracle(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    return x.clone()


def error_bound(x: Tensor, state: dict[str, Tensor], eps: float) -> Tensor:
    return torch.full_like(x, torch.finfo(x.dtype).tiny)  # no error is allowed, but the contract test divides by this
