"""Derf: the error function of torch, here in float64."""

import math

import torch
from torch import Tensor

COMPILED_ERROR = 1e-6  # torch.compile approximates erf on the CPU: error 4.9e-7 on [-3, 3], times a gain of up to 2


def oracle(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    return state["weight"] * torch.erf(state["alpha"] * x + state["shift"]) + state["bias"]


def error_bound(x: Tensor, state: dict[str, Tensor], eps: float, **norm_args) -> Tensor:
    """Rounding of α·x + s as propagated by erf, of erf, and of gain and bias. Measured: 0.6 of this bound."""
    product = state["alpha"] * x
    inner = product + state["shift"]
    propagated = (product.abs() + inner.abs()) * 2 / math.sqrt(math.pi) * torch.exp(-(inner**2))
    return eps * ((propagated + 2 * torch.erf(inner).abs()) * state["weight"].abs() + state["bias"].abs())
