"""Batch Normalization, arXiv 1502.03167."""

import torch
from torch import Tensor, nn

from norms.numerics import check_eps, upcast
from norms.registry import register


@register("batchnorm", per_token=False, causal_in_training=False, shift_invariant=True, per_head=False)
class BatchNorm(nn.Module):
    """(x − μ) / sqrt(σ² + eps) · weight + bias on (..., dim), μ and biased σ² computed per feature over all tokens.

    In training it leaks the future: a token is normalized with statistics of the whole batch, which include later
    tokens of its own sequence, so the training loss is too low. In evaluation μ and σ² are running averages, and no
    token sees another.

    A training step updates the averages with torch's `momentum`, new = (1 − momentum)·old + momentum·batch, and the
    unbiased σ². An empty batch leaves them unchanged. A batch of one token has no variance and raises ValueError.
    """

    def __init__(self, dim: int, eps: float = 1e-5, *, momentum: float = 0.1):
        super().__init__()
        check_eps(eps)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum of batchnorm must be above 0 and at most 1, not {momentum}")
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.running_mean: Tensor = nn.Buffer(torch.zeros(dim))
        self.running_var: Tensor = nn.Buffer(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = upcast(x)
        count = x.numel() // len(self.weight)
        if not (self.training and count):
            mean, var = self.running_mean.to(h.dtype), self.running_var.to(h.dtype)
        elif count < 2:
            raise ValueError("batchnorm cannot train on a batch of one token: it has no variance")
        else:
            var, mean = torch.var_mean(h.reshape(-1, h.shape[-1]), 0, correction=0)
            unbiased = var.detach() * count / (count - 1)
            dtype = self.running_mean.dtype
            # Replaced, not modified, because backward may need the old ones.
            self.running_mean = self.running_mean.lerp(mean.detach().to(dtype), self.momentum)
            self.running_var = self.running_var.lerp(unbiased.to(dtype), self.momentum)
        return ((h - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias).to(x.dtype)
