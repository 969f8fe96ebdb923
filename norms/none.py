"""The no-normalization baseline."""

from torch import Tensor, nn

from norms.registry import register


@register("none", scale_invariant=False, identity=True, per_head=False)
class NoNorm(nn.Module):
    """The identity on (..., dim)."""

    def __init__(self, dim: int):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x
