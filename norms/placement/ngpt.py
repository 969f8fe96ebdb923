"""nGPT: Normalized Transformer with Representation Learning on the Hypersphere, arXiv 2410.01131.

All vectors along the model's width have length 1: the residual stream, and the rows or columns of every matrix, which
return to the sphere after each step. Learned scales restore what the lengths expressed. A scale of initial value `init`
is stored as `init / factor`, so the optimizer changes it `factor` times as fast.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from norms.numerics import upcast
from norms.placement.one_stream import Site

ALPHA = 0.05  # the initial α


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ over the last axis, in at least fp32."""
    return F.normalize(upcast(x), dim=-1)


def init_on_sphere(x: Tensor, **arguments) -> Tensor:
    """The stream starts as the embedding, with length 1 after dropout as well."""
    return unit(x).to(x.dtype)


class NormalizedUpdate(nn.Module):
    """N(x + |α| ⊙ (N(f(x)) − x)), where N(x) = x / ‖x‖ and α is a learned vector, initialized to 0.05."""

    def __init__(self, site: Site):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((site.dim,), site.dim**-0.5))
        self.factor = ALPHA * math.sqrt(site.dim)

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        h = upcast(x)
        alpha = (self.alpha * self.factor).abs()
        return unit(h + alpha * (unit(f(x, *args)) - h)).to(x.dtype)


class UnitKey(nn.Module):
    """k / ‖k‖ of each head, B T K D."""

    def forward(self, k: Tensor) -> Tensor:
        return unit(k).to(k.dtype)


class UnitQuery(nn.Module):
    """D · s² ⊙ q / ‖q‖ of each head, B T H D, after RoPE; s is learned, initialized to 1.

    The paper scales both q and k by s, and their product by √D. Here q carries both factors of s, because several query
    heads may share a key, and D, because attention divides by √D.
    """

    def __init__(self, heads: int, head_dim: int, dim: int):
        super().__init__()
        self.scale = nn.Parameter(torch.full((heads * head_dim,), dim**-0.5))
        self.factor = math.sqrt(dim)

    def forward(self, q: Tensor) -> Tensor:
        scale = (self.scale * self.factor).view(q.shape[-2:])  # H D
        return (unit(q) * (q.shape[-1] * scale.square())).to(q.dtype)


class ScaledLinear(nn.Module):
    """s ⊙ W x with the weight of `linear`; s is learned, stored as `stored` at the start.

    Not an `nn.Linear`, so tools that merge adapters reject it: merging would ignore the scale.
    """

    def __init__(self, linear: Any, stored: float, factor: float):
        super().__init__()
        self.weight, self.role = linear.weight, linear.role
        self.scale = nn.Parameter(torch.full((linear.out_features,), stored))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return (y * (self.scale * self.factor)).to(y.dtype)


def rotated_norm(site: str, config: Any) -> nn.Module:
    """The norm of queries or keys, after RoPE."""
    return UnitQuery(config.heads, config.head_dim, config.dim) if site == "query" else UnitKey()


def scale(linear: Any, config: Any) -> nn.Module:
    """A matrix of the MLP, or the head, with the learned scale of its role."""
    root = math.sqrt(config.dim)
    stored, factor = {"gate": (1.0, root), "up": (1.0, 1.0), "head": (1 / root, root)}[linear.role.name]
    return ScaledLinear(linear, stored, factor)


@torch.no_grad()
def return_to_sphere(weight: Tensor, role: Any) -> None:
    """Give every row or column of a matrix along the model's width length 1."""
    weight.div_(weight.norm(dim=0 if role.into_stream else 1, keepdim=True).clamp_min(1e-12))
