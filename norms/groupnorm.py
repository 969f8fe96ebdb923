"""Group Normalization, arXiv 1803.08494, on the features of a token."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from norms.fused import Statistics, normalise
from norms.numerics import check_arguments, upcast
from norms.registry import register

FEWEST = 8  # features of a group; what is left of two is a sign, of one nothing


@register("groupnorm", shift_invariant=True, per_head=False)
class GroupNorm(nn.Module):
    """(x − μ) / sqrt(σ² + eps) · weight + bias, each of `groups` equal runs of features with its own μ and biased σ².

    LayerNorm inside each group of a token, (..., dim) → (..., dim); one group is LayerNorm. In images, for which it
    was made, statistics take in the pixels besides; over the tokens of a sequence they would see the future.
    Computed in fp32, then cast back once.
    """

    def __init__(self, dim: int, eps: float = 1e-5, *, groups: int = 2):
        super().__init__()
        check_arguments(dim, eps=eps)
        if groups < 1 or dim % groups or dim // groups < FEWEST:
            raise ValueError(
                f"groups of groupnorm must divide the {dim} features into groups of at least {FEWEST}, not {groups}"
            )
        self.groups, self.eps = groups, eps
        self.statistics = Statistics((dim // groups,), eps, centred=True)
        self.weight, self.bias = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        grouped, *affine = (tensor.unflatten(-1, (self.groups, -1)) for tensor in (x, self.weight, self.bias))
        return normalise(self.formula, self.statistics, grouped, *affine).flatten(-2)

    def formula(self, grouped: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normalised = F.layer_norm(upcast(grouped), grouped.shape[-1:], eps=self.eps)
        return (normalised * weight + bias).to(grouped.dtype)
