"""Where a norm stands around a sublayer: a placement is a residual connection.

In the formulas N is a norm, f a sublayer (attention or MLP) and x the residual stream, (B, T, dim).
A residual connection owns its norms and is handed the sublayer when it is called, so that a block
reads the same under every placement.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Site:
    """Where a residual connection stands, for placements whose formula depends on it."""

    name: str  # "attention" or "mlp"
    layer: int  # of this block, from 0
    depth: int  # blocks in the model
    make_norm: Callable[[str], nn.Module]  # a fresh norm of the chosen kind, told the name of its site


class PreNorm(nn.Module):
    """x + f(N(x)). On Layer Normalization in the Transformer Architecture, arXiv 2002.04745."""

    def __init__(self, site: Site):
        super().__init__()
        self.norm = site.make_norm(site.name)

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return x + f(self.norm(x), *args)


class PostNorm(nn.Module):
    """N(x + f(x)). Attention Is All You Need, arXiv 1706.03762."""

    def __init__(self, site: Site):
        super().__init__()
        self.norm = site.make_norm(site.name)

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return self.norm(x + f(x, *args))


def final_norm(make_norm: Callable[[str], nn.Module]) -> nn.Module:
    """The norm between the last block and the head."""
    return make_norm("final")


def no_final_norm(make_norm: Callable[[str], nn.Module]) -> nn.Module:
    """Nothing between the last block and the head: its output is normalised already."""
    return nn.Identity()


@dataclass(frozen=True)
class Placement:
    """What a placement says about the whole model.

    `residual` makes the connection at one site. `start` turns the embedding into the residual stream
    and `finish` makes the module that turns the stream into what the head reads (a placement with two
    streams carries them as one tuple). `init_gain(role, depth)` scales the initial draw of a weight by its role
    (a key of `model.ROLES`), and `depth_scaled` says whether output projections may be scaled down with depth besides.
    """

    residual: Callable[[Site], nn.Module]
    finish: Callable[[Callable[[str], nn.Module]], nn.Module]
    start: Callable[[Tensor], object] = lambda x: x
    init_gain: Callable[[str, int], float] = lambda role, depth: 1.0
    depth_scaled: bool = True


PLACEMENTS = {
    "pre": Placement(PreNorm, final_norm),
    "post": Placement(PostNorm, no_final_norm),
}
