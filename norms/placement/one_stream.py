"""Residual connections with one stream, and the `Site` that each connection gets.

In the formulas N is a norm, f a sublayer (attention or MLP), x the residual stream (B, T, dim), l the index
of the block, from 1, and L the number of blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Site:
    """The position of a residual connection or of the final norm, and the factories for what it owns."""

    name: str  # "attention", "mlp" or "final"
    layer: int  # index of the block, from 0
    depth: int  # number of blocks
    dim: int  # width of the residual stream
    make_norm: Callable[[str], nn.Module]  # site name -> a new norm of the chosen kind
    make_matrix: Callable[[int, int, str], nn.Module]  # inputs, outputs, role -> a new matrix, drawn by its role


class OneNorm(nn.Module):
    """Base class of the residual connections with one norm.

    `output_norms` are those of its norms whose result is, or is added to, the stream. The others feed the sublayer.
    """

    output_norms: tuple[str, ...] = ()

    def __init__(self, site: Site):
        super().__init__()
        self.norm = site.make_norm(site.name)


class PreNorm(OneNorm):
    """x + f(N(x)). On Layer Normalization in the Transformer Architecture, arXiv 2002.04745."""

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return x + f(self.norm(x), *args)


class PostNorm(OneNorm):
    """N(x + f(x)). Attention Is All You Need, arXiv 1706.03762."""

    output_norms = ("norm",)

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return self.norm(x + f(x, *args))


class DeepNorm(PostNorm):
    """N(αx + f(x)), α = (2L)^¼. DeepNet, arXiv 2203.00555. Initialized with `deepnorm_gain`."""

    def __init__(self, site: Site):
        super().__init__(site)
        self.alpha = (2 * site.depth) ** 0.25

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return self.norm(self.alpha * x + f(x, *args))


def deepnorm_gain(role: str, depth: int) -> float:
    """(8L)^-¼ for the value and output projections and the MLP; 1 for all other weights."""
    return (8 * depth) ** -0.25 if role in ("value", "attention_out", "gate", "up", "down") else 1.0


class Sandwich(OneNorm):
    """x + N(f(N(x))). CogView, arXiv 2105.13290; Peri-LN, arXiv 2502.02732; Gemma 2."""

    output_norms = ("norm_out",)

    def __init__(self, site: Site):
        super().__init__(site)
        self.norm_out = site.make_norm(site.name)

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return x + self.norm_out(f(self.norm(x), *args))


class Keel(Sandwich):
    """N(αx + f(N(x))), α = 2L, the number of sublayers; α = 1 in the first block. Keel, arXiv 2601.19895.

    The paper's text was not seen. In another reading, the first block is pre-norm: x + f(N(x)) around its MLP as well.
    """

    def __init__(self, site: Site):
        super().__init__(site)
        self.alpha = 2 * site.depth if site.layer > 0 else 1

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return self.norm_out(self.alpha * x + f(self.norm(x), *args))


def keel(site: Site) -> nn.Module:
    """Keel, but pre-norm around the first attention: the stream starts as the embedding without a norm."""
    return PreNorm(site) if (site.name, site.layer) == ("attention", 0) else Keel(site)


class Reordered(OneNorm):
    """x + N(f(x)). OLMo 2, arXiv 2501.00656."""

    output_norms = ("norm",)

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return x + self.norm(f(x, *args))


class LayerNormScaling(OneNorm):
    """x + f(N(x) / √l). The Curse of Depth, arXiv 2502.05795."""

    def __init__(self, site: Site):
        super().__init__(site)
        self.scale = (site.layer + 1) ** -0.5

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return x + f(self.scale * self.norm(x), *args)


def mix_norm(site: Site) -> nn.Module:
    """Post-norm in the first quarter of the blocks (at least one), pre-norm in the rest. Mix-LN, arXiv 2412.13795."""
    return PostNorm(site) if site.layer < max(1, site.depth // 4) else PreNorm(site)


class PlainResidual(nn.Module):
    """x + f(x)."""

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return x + f(x, *args)


class NormThenResidual(OneNorm):
    """αh + βf(h), h = N(x), with constants α and β. MiniMax-01, arXiv 2501.08313."""

    output_norms = ("norm",)

    def __init__(self, site: Site, *, alpha: float = 1.0, beta: float = 1.0):
        super().__init__(site)
        self.alpha, self.beta = alpha, beta

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        h = self.norm(x)
        return self.alpha * h + self.beta * f(h, *args)


class ParallelAttention(OneNorm):
    """x + f(h) and h = N(x), which the MLP beside it reads too. PaLM, arXiv 2204.02311; Cohere."""

    def forward(self, x: Tensor, f: Callable, *args) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        return x + f(h, *args), h


class ParallelMLP(nn.Module):
    """x + f(h), with what `ParallelAttention` returned."""

    def forward(self, stream: tuple[Tensor, Tensor], f: Callable, *args) -> Tensor:
        x, h = stream
        return x + f(h, *args)


def parallel(site: Site) -> nn.Module:
    """x + attention(N(x)) + MLP(N(x)), with one norm."""
    return ParallelAttention(site) if site.name == "attention" else ParallelMLP()


def hybrid_norm(site: Site) -> nn.Module:
    """x + f(x) around attention, which normalizes q, k and v of each head; h + f(h), h = N(x), around the MLP.

    HybridNorm, arXiv 2503.04598.
    """
    return PlainResidual() if site.name == "attention" else NormThenResidual(site)


def hybrid_star(site: Site) -> nn.Module:
    """Hybrid, but pre-norm around both sublayers of the first block, whose attention still normalizes q, k and v.

    HybridNorm*, as in its authors' code; the paper's text was not seen.
    """
    return PreNorm(site) if site.layer == 0 else hybrid_norm(site)


class ReZero(nn.Module):
    """x + a·f(x), where a is a learned scalar, initialized to 0. ReZero is All You Need, arXiv 2003.04887."""

    def __init__(self, site: Site):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        return x + self.a * f(x, *args)


def without_final_norm(site: Site, **arguments) -> nn.Module:
    """No norm between the last block and the head: the output of the block is already normalized."""
    return nn.Identity()
