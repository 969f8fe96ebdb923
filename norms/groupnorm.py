"""Group Normalization, arXiv 1803.08494, on the features of a token."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from norms.numerics import check_eps, upcast
from norms.registry import register

MIN_GROUP_SIZE = 8  # minimum features per group: a group of two is normalized to ±1, a group of one to 0


@register("groupnorm", shift_invariant=True, per_head=False)
class GroupNorm(nn.Module):
    """(x − μ) / sqrt(σ² + eps) · weight + bias, μ and biased σ² over each of `groups` contiguous groups of features.

    LayerNorm inside each group of a token's features, (..., dim) → (..., dim); one group is LayerNorm. For images the
    statistics also cover the pixels; over the tokens of a sequence they would see the future. Computed in fp32, then
    cast back once.
    """

    def __init__(self, dim: int, eps: float = 1e-5, *, groups: int = 2):
        super().__init__()
        check_eps(eps)
        if groups < 1 or dim % groups or dim // groups < MIN_GROUP_SIZE:
            parts = f"the {dim} features into groups of at least {MIN_GROUP_SIZE}"
            raise ValueError(f"groups of groupnorm must divide {parts}, not {groups}")
        self.groups, self.eps = groups, eps
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        grouped = upcast(x).unflatten(-1, (self.groups, -1))
        y = F.layer_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        return (y * self.weight + self.bias).to(x.dtype)
