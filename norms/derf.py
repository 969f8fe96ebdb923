"""Derf, the dynamic error function: Stronger Normalization-Free Transformers, arXiv 2512.10938."""

import torch
from torch import Tensor, nn

from norms.numerics import upcast
from norms.registry import register


@register("derf", scale_invariant=False)
class Derf(nn.Module):
    """weight · erf(α · x + s) + bias, feature by feature: no statistics, α in `alpha` and s in `shift`, of shape (1,).

    Like DyT with erf instead of tanh and a learned shift: α starts at `alpha`, multiplied by `attention_ratio` in
    attention's residual connection, s at 0. 0.5 everywhere is the authors' vision model. Their language model starts α
    at 1 before attention, before the MLP and at the end, each an option of its own, and multiplies the embedding by a
    learned scalar, √dim at the start: alpha=1 and --scaled-embedding. Computed in fp32, then cast back once.
    """

    def __init__(self, dim: int, site: str = "", *, alpha: float = 0.5, attention_ratio: float = 1.0):
        super().__init__()
        if min(alpha, attention_ratio) <= 0:
            raise ValueError(f"alpha and attention_ratio of derf must be positive, not {alpha} and {attention_ratio}")
        initial_alpha = alpha * attention_ratio if site == "attention" else alpha
        self.alpha, self.shift = nn.Parameter(torch.full((1,), float(initial_alpha))), nn.Parameter(torch.zeros(1))
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.erf(self.alpha * upcast(x) + self.shift) * self.weight + self.bias).to(x.dtype)
