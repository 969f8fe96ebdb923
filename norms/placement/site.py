"""The constructor argument of a residual connection."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

MakeNorm = Callable[[str], nn.Module]  # site name -> a new norm of the chosen kind


@dataclass(frozen=True)
class Site:
    """The position of a residual connection in the model, and the factory for its norms."""

    name: str  # "attention" or "mlp"
    layer: int  # index of the block, from 0
    depth: int  # number of blocks
    dim: int  # width of the residual stream
    make_norm: MakeNorm
