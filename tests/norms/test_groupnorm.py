"""GroupNorm: which features are normalized together."""

import pytest
import torch
from torch import Tensor

from norms.groupnorm import GroupNorm
from tests.random_values import normal, randomize

WIDTHS = 16  # the contract tests use multiples of this: two groups of eight


def standardized(x: Tensor, eps: float, groups: int) -> tuple[Tensor, ...]:
    """The normalized features, and |μ| and σ of the group of each feature."""
    parts = []
    for group in x.chunk(groups, -1):
        mean = group.sum(-1, keepdim=True) / group.shape[-1]
        std = ((group - mean).pow(2).sum(-1, keepdim=True) / group.shape[-1] + eps).sqrt()
        parts.append(((group - mean) / std, mean.abs().expand_as(group), std.expand_as(group)))
    return tuple(torch.cat(each, -1) for each in zip(*parts, strict=True))


def oracle(x: Tensor, state: dict[str, Tensor], eps: float = 1e-5, groups: int = 2) -> Tensor:
    return standardized(x, eps, groups)[0] * state["weight"] + state["bias"]


def error_bound(x: Tensor, state: dict[str, Tensor], eps: float, groups: int = 2, **norm_args) -> Tensor:
    """LayerNorm's bound, with the statistics of each group. Measured: 0.8 of this bound."""
    normalized, mean, std = standardized(x, norm_args.get("eps", 1e-5), groups)
    return 2 * eps * (1 + mean / std) * ((1 + normalized.abs()) * state["weight"].abs() + state["bias"].abs())


@pytest.mark.parametrize(("dim", "groups"), [(32, 4), (8, 1), (24, 3)])
def test_any_number_of_groups(dim, groups):
    norm, x = randomize(GroupNorm(dim, groups=groups).double()), normal(20, dim).double()
    torch.testing.assert_close(norm(x), oracle(x, norm.state_dict(), groups=groups), rtol=0, atol=1e-12)
