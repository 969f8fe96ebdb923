"""What a residual connection is told when it is made."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

MakeNorm = Callable[[str], nn.Module]  # a fresh norm of the chosen kind, told the name of its site


@dataclass(frozen=True)
class Site:
    """Where a residual connection stands, for placements whose formula depends on it."""

    name: str  # "attention" or "mlp"
    layer: int  # of this block, from 0
    depth: int  # blocks in the model
    make_norm: MakeNorm
