"""Power Normalization: PowerNorm, Rethinking Batch Normalization in Transformers, arXiv 2003.07845."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from norms.numerics import check_eps, upcast
from norms.registry import register


@register("powernorm", per_token=False, causal_in_training=False, exact_backward=False, per_head=False)
class PowerNorm(nn.Module):
    """x / sqrt(ψ² + eps) · weight + bias, each feature of (..., dim) with ψ², a running mean of its squares.

    A training step divides by the ψ² of earlier steps, then updates it: new = momentum·old + (1 − momentum)·batch.
    Unlike in the paper, the first batches have equal weights, so the initial value has no influence. During the first
    `warmup` training batches it divides by the batch's own mean square and so leaks the future: later tokens of the
    same sequence are in it. Evaluation does not update ψ². The gradient is approximate, see `DivideByRunningRMS`.
    """

    def __init__(self, dim: int, eps: float = 1e-5, *, momentum: float = 0.9, warmup: int = 100):
        super().__init__()
        check_eps(eps)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum of powernorm must be at least 0 and below 1, not {momentum}")
        self.eps, self.momentum, self.warmup = eps, momentum, warmup
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.running_square: Tensor = nn.Buffer(torch.ones(dim))
        self.running_projection = nn.Buffer(torch.zeros(dim))
        self.batches: Tensor = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = upcast(x)
        if not (self.training and x.numel()):
            y = h * torch.rsqrt(self.running_square.to(h.dtype) + self.eps)
        else:
            r = torch.rsqrt(self.track(h.detach().reshape(-1, h.shape[-1]).square().mean(0)) + self.eps)
            y = DivideByRunningRMS.apply(h, r, self.running_projection, 1 - self.momentum)
        return (y * self.weight + self.bias).to(x.dtype)

    def track(self, batch: Tensor) -> Tensor:
        """Update ψ² with a batch's mean squares, and return the ψ² to divide by.

        Buffers are replaced, not modified, because backward may need the old ones.
        """
        old = self.running_square.to(batch.dtype)
        square = torch.where(self.batches < self.warmup, batch, old)
        self.batches = self.batches + 1
        rate = (1 / self.batches.to(batch.dtype)).clamp_min(1 - self.momentum)
        self.running_square = torch.lerp(old, batch, rate).to(self.running_square.dtype)
        return square


class DivideByRunningRMS(torch.autograd.Function):
    """n = x · r with the paper's backward, dx = r · (dn − ν · n) (its algorithm 2).

    With statistics of the batch itself, the exact gradient has mean(dn · n) over its tokens in place of ν. Here ν is a
    running estimate of that, updated in each backward: ν ← ν + rate · mean((dn − ν · n) · n).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Tensor, projection: Tensor, rate: float) -> Tensor:
        n = x * r
        ctx.save_for_backward(n, r)
        ctx.projection, ctx.rate = projection, rate
        return n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor, None, None, None]:
        n, r = ctx.saved_tensors
        rest = grad_n - ctx.projection * n
        updated = ctx.projection + ctx.rate * (rest * n).reshape(-1, n.shape[-1]).mean(0)
        # Skip the update when float16 gradients overflow. ν then has the scale of earlier losses for a while.
        ctx.projection.copy_(torch.where(updated.isfinite(), updated, ctx.projection))
        return r * rest, None, None, None
