"""Residual connections with two streams, each (B, T, dim), passed from block to block as a pair.

In the formulas N is a norm, f a sublayer (attention or MLP) and l the index of the block, from 1.
"""

from collections.abc import Callable

from torch import Tensor, nn

from norms.placement.one_stream import OneNorm, Site


def duplicate(x: Tensor) -> tuple[Tensor, Tensor]:
    """Both streams start as the embedding."""
    return x, x


class ResiDual(OneNorm):
    """x ← N(x + f(x)), r ← r + f(x). ResiDual, arXiv 2304.14802."""

    output_norms = ("norm",)

    def forward(self, streams: tuple[Tensor, Tensor], f: Callable, *args) -> tuple[Tensor, Tensor]:
        x, r = streams
        z = f(x, *args)
        return self.norm(x + z), r + z


class ResiDualOutput(OneNorm):
    """x + N(r)."""

    def forward(self, streams: tuple[Tensor, Tensor]) -> Tensor:
        x, r = streams
        return x + self.norm(r)


class Siamese(nn.Module):
    """x̂ = N(x), z = f(N(x̂ + N(y))), x ← x̂ + z / √(2l), y ← y + z. SiameseNorm, arXiv 2602.08064."""

    output_norms = ("norm_x",)

    def __init__(self, site: Site):
        super().__init__()
        self.norm_x, self.norm_y, self.norm = (site.make_norm(site.name) for _ in range(3))
        self.scale = (2 * (site.layer + 1)) ** -0.5

    def forward(self, streams: tuple[Tensor, Tensor], f: Callable, *args) -> tuple[Tensor, Tensor]:
        x, y = self.norm_x(streams[0]), streams[1]
        z = f(self.norm(x + self.norm_y(y)), *args)
        return x + self.scale * z, y + z


class SiameseOutput(nn.Module):
    """N(N(x) + N(y))."""

    def __init__(self, site: Site):
        super().__init__()
        self.norm_x, self.norm_y, self.norm = (site.make_norm(site.name) for _ in range(3))

    def forward(self, streams: tuple[Tensor, Tensor]) -> Tensor:
        x, y = streams
        return self.norm(self.norm_x(x) + self.norm_y(y))
