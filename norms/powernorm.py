"""Power Normalization: PowerNorm, Rethinking Batch Normalization in Transformers, arXiv 2003.07845."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from norms.columns import combine, fits, normalise, sums
from norms.numerics import check_arguments, upcast
from norms.registry import register


@register("powernorm", per_token=False, causal_in_training=False, exact_backward=False, per_head=False)
class PowerNorm(nn.Module):
    """x / sqrt(ψ² + eps) · weight + bias, each feature of (..., dim) with a running mean ψ² of its squares.

    A training step divides by the ψ² of the steps before it, then moves that by new = momentum · old + (1 − momentum)
    · batch (the first few batches count alike, so that nothing is left of the start value). During the first `warmup`
    training batches it divides by the batch's own mean square instead, and so leaks the future: a token is normalised
    with later tokens of its own sequence. Evaluation uses ψ² as it stands.

    The gradient is approximate, see `DivideByRunningRMS`.
    """

    running_square: Tensor
    running_projection: Tensor
    batches: Tensor

    def __init__(self, dim: int, eps: float = 1e-5, *, momentum: float = 0.9, warmup: int = 100):
        super().__init__()
        check_arguments(dim, eps=eps)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum of powernorm must be at least 0 and below 1, not {momentum}")
        self.eps, self.momentum, self.warmup = eps, momentum, warmup
        self.weight, self.bias = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.register_buffer("running_square", torch.empty(dim))
        self.register_buffer("running_projection", torch.empty(dim))
        self.register_buffer("batches", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.ones_(self.running_square)
        for zero in (self.bias, self.running_projection, self.batches):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and x.numel()):
            given = torch.zeros_like(self.running_square), self.running_square
            return normalise(self.formula, x, self.weight, self.bias, self.eps, *given)[0]
        tokens = x.reshape(-1, x.shape[-1])
        by_columns = fits(tokens, self.weight, self.bias, self.running_square)
        batch = mean_squares(tokens.detach(), by_columns)
        r = torch.rsqrt(self.take_in(batch) + self.eps)
        projection = self.running_projection, 1 - self.momentum
        return DivideByRunningRMS.apply(by_columns, tokens, self.weight, self.bias, r, batch, *projection).view(x.shape)

    def formula(
        self, x: Tensor, weight: Tensor, bias: Tensor, zeros: Tensor, square: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What evaluation computes. `zeros` stand for the mean that `normalise` speaks of; none is subtracted here."""
        h = upcast(x)
        return (h * torch.rsqrt(square.to(h.dtype) + self.eps) * weight + bias).to(x.dtype), zeros, square

    def take_in(self, batch: Tensor) -> Tensor:
        """Move ψ² by the mean squares of a batch, and return what that is to be divided by the root of."""
        before = self.running_square.to(batch.dtype)
        square = torch.where(self.batches < self.warmup, batch, before)
        self.batches += 1
        share = (1 / self.batches.to(batch.dtype)).clamp_min(1 - self.momentum)
        self.running_square.copy_(torch.lerp(before, batch, share))
        return square


def mean_squares(tokens: Tensor, by_columns: bool) -> Tensor:
    if by_columns:
        return sums(tokens, torch.zeros_like(tokens[0]))[1] / len(tokens)
    return upcast(tokens).square().mean(0)


class DivideByRunningRMS(torch.autograd.Function):
    """n · weight + bias, n = x · r, with the paper's derivative dx = r · (dn − ν · n) (its algorithm 2).

    The exact one for statistics of the batch itself would have mean(dn · n) over its tokens in the place of ν, which
    is a running estimate of that, and moves with every backward pass: ν ← ν + (1 − momentum) · mean((dn − ν · n) · n).
    `by_columns` says whether columns.c can do it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        by_columns: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        r: Tensor,
        square: Tensor,
        projection: Tensor,
        share: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, r, square)
        ctx.by_columns, ctx.projection, ctx.share = by_columns, projection, share
        if by_columns:
            return combine(x, torch.zeros_like(r), r * weight, bias)
        return torch.addcmul(bias, upcast(x), r * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        x, weight, r, square = ctx.saved_tensors
        scale, slope, zeros = r * weight, ctx.projection * r * r, torch.zeros_like(r)
        if ctx.by_columns:
            grad_bias, along = sums(x, zeros, grad_y)
            grad_x = combine(x, zeros, -slope, zeros, grad_y, scale)
        else:
            h, g = upcast(x), upcast(grad_y)
            grad_bias, along = g.sum(0), (g * h).sum(0)
            grad_x = torch.addcmul(g * scale, h, slope, value=-1).to(x.dtype)
        grad_weight = r * along
        moved = ctx.projection + ctx.share * (weight * grad_weight / len(x) - slope * square)
        # A gradient that overflowed, as float16's do at first, is thrown away by the optimizer: forget it here too.
        ctx.projection.copy_(torch.where(moved.isfinite(), moved, ctx.projection))
        return None, grad_x, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None, None, None
