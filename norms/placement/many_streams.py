"""Residual connections with more than one stream: a pair, n streams, or all that was computed before.

In the formulas N is a norm, f a sublayer (attention or MLP), l the index of the block, from 1, C the width of the
model, and r(x) = x / √(mean(x²) + ε) with ε = 1e-6. Mixtures are computed in at least fp32, in mixed precision as well.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from norms.numerics import upcast
from norms.placement.one_stream import OneNorm, Site

EPS = 1e-6
SINKHORN_STEPS = 20
Ends = Literal["weighted", "mean"]


# --- two streams, each B T C, as a pair ------------------------------------------------------------------------------


def duplicate(x: Tensor, **arguments) -> tuple[Tensor, Tensor]:
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


# --- n streams X, B T n C --------------------------------------------------------------------------------------------


def copies(x: Tensor, *, streams: int = 4, end: Ends = "weighted") -> Tensor:
    """Every stream starts as the embedding: B T C to B T n C."""
    return x.unsqueeze(2).expand(-1, -1, streams, -1)


class HyperConnection(OneNorm):
    """X ← post ⊗ f(N(Σᵢ preᵢ Xᵢ)) + Mᵀ X. mHC, arXiv 2512.24880, as DeepSeek V4 has it.

    Each token has its own weights: with z = s ⊙ W r(X) + b, where r is over all n · C features, pre = σ(z) + ε and
    post = 2σ(z) are vectors of n, and M is n × n, the softmax of z with rows and columns divided by their sums in turn.
    So M mixes the streams without making them larger. s, a number for each of the three, starts at 1, and b at 0.
    """

    def __init__(self, site: Site, *, streams: int = 4, end: Ends = "weighted"):
        super().__init__(site)
        if streams < 1:
            raise ValueError(f"--placement-arg streams must be at least 1, not {streams}")
        self.sizes = (streams, streams, streams * streams)  # pre, post and M
        self.maps = site.make_matrix(streams * site.dim, sum(self.sizes), "stream_map")
        self.scale, self.base = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(sum(self.sizes)))

    def forward(self, x: Tensor, f: Callable, *args) -> Tensor:
        parts = project(self.maps, x).split(self.sizes, dim=-1)
        pre, post, mix = (s * z + b for s, z, b in zip(self.scale, parts, self.base.split(self.sizes), strict=True))
        mix = doubly_stochastic(mix.unflatten(-1, (x.shape[2], -1)))  # B T n n
        y = f(self.norm(collapse(pre, x)), *args)  # B T C
        # One stream at a time: a batched product of small matrices is slow on a CPU.
        kept = sum(mix[:, :, i, :, None] * x[:, :, i, None] for i in range(x.shape[2]))  # B T n C
        return (2 * post.sigmoid().unsqueeze(-1) * y.unsqueeze(2) + kept).to(x.dtype)


class HyperConnectionOutput(OneNorm):
    """N(Σᵢ preᵢ Xᵢ) with weights as in `HyperConnection`, as DeepSeek V4 ends, or N(mean of X), as GLM 5 does."""

    def __init__(self, site: Site, *, streams: int = 4, end: Ends = "weighted"):
        super().__init__(site)
        self.maps = site.make_matrix(streams * site.dim, streams, "stream_map") if end == "weighted" else None
        if self.maps is not None:
            self.scale, self.base = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(streams))

    def forward(self, x: Tensor) -> Tensor:
        if self.maps is None:
            return self.norm(x.mean(2))
        return self.norm(collapse(self.scale * project(self.maps, x) + self.base, x))


def project(maps: Any, x: Tensor) -> Tensor:
    """W r(X), one vector for all streams of a token."""
    flat = upcast(x).flatten(2)  # B T nC
    with torch.autocast(x.device.type, enabled=False):
        return upcast(maps(F.rms_norm(flat, flat.shape[-1:], eps=EPS).to(maps.weight.dtype)))


def collapse(z: Tensor, x: Tensor) -> Tensor:
    """Σᵢ preᵢ Xᵢ, B T C, with pre = σ(z) + ε."""
    return ((z.sigmoid() + EPS).unsqueeze(-1) * x).sum(2).to(x.dtype)


def doubly_stochastic(z: Tensor) -> Tensor:
    """Matrices B T n n whose rows and columns sum to about 1, by the algorithm of Sinkhorn and Knopp."""
    m = z.softmax(-1) + EPS
    for step in range(SINKHORN_STEPS):
        if step > 0:
            m = m / (m.sum(-1, keepdim=True) + EPS)
        m = m / (m.sum(-2, keepdim=True) + EPS)
    return m


# --- sources v₀, v₁, …, each B T C -----------------------------------------------------------------------------------

Sources = tuple[Tensor, ...]


def one_source(x: Tensor, **arguments) -> Sources:
    """The first source is the embedding."""
    return (x,)


def newest(sources: Sources) -> Sources:
    return sources[-1:]


class Mixture(OneNorm):
    """N(Σᵢ wᵢ vᵢ), w = softmaxᵢ(q · r(vᵢ) / √C), with a learned vector q, 0 at the start.

    scale_scores: divide scores by √C. Without that, as in the paper, q changes √C times as fast.
    normalize_values: sum r(vᵢ), as in Inkling 2.
    """

    def __init__(self, site: Site, *, scale_scores: bool = True, normalize_values: bool = False):
        super().__init__(site)
        first = (site.name, site.layer) == ("attention", 0)  # There is one source, which is read as it is.
        self.query = None if first else nn.Parameter(torch.zeros(site.dim))
        self.scale, self.normalize_values = site.dim**-0.5 if scale_scores else 1.0, normalize_values

    def read(self, sources: Sources) -> Tensor:
        if self.query is None:
            return self.norm(sources[0])
        wide = [upcast(v) for v in sources]
        # Products with small tensors, and no stack: backward then keeps each source once, not once for every mixture.
        inverse = torch.cat([torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS) for v in wide], -1)  # B T m
        scores = torch.cat([(v * self.query).sum(-1, keepdim=True) for v in wide], -1) * inverse * self.scale
        weights = scores.softmax(-1) * (inverse if self.normalize_values else 1)  # B T m
        return self.norm(sum(w * v for w, v in zip(weights.split(1, -1), wide, strict=True)).to(sources[0].dtype))


class AttentionResidual(Mixture):
    """f(N(Σᵢ wᵢ vᵢ)) is the next source. Attention Residuals, arXiv 2603.15031. See `Mixture` for w."""

    appends = True

    def forward(self, sources: Sources, f: Callable, *args) -> Sources:
        y = f(self.read(sources), *args).to(sources[0].dtype)
        return (*sources, y) if self.appends else (*sources[:-1], sources[-1] + y)


class BlockAttentionResidual(AttentionResidual):
    """Sources are the embedding and, of each group of `layers` blocks, the sum of its outputs so far. Inkling 2."""

    def __init__(self, site: Site, *, layers: int = 2, scale_scores: bool = True, normalize_values: bool = False):
        super().__init__(site, scale_scores=scale_scores, normalize_values=normalize_values)
        if layers < 1:
            raise ValueError(f"--placement-arg layers must be at least 1, not {layers}")
        self.appends = site.name == "attention" and site.layer % layers == 0


class AttentionResidualOutput(Mixture):
    """N(Σᵢ wᵢ vᵢ) over all sources."""

    def __init__(self, site: Site, *, layers: int = 1, **arguments):
        super().__init__(site, **arguments)

    def forward(self, sources: Sources) -> Tensor:
        return self.read(sources)
