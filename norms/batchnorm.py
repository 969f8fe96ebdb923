"""Batch Normalization, arXiv 1502.03167."""

import torch
from torch import Tensor, nn

from norms.columns import normalise
from norms.numerics import check_arguments, upcast
from norms.registry import register


@register("batchnorm", per_token=False, causal_in_training=False, shift_invariant=True, per_head=False)
class BatchNorm(nn.Module):
    """(x − μ) / sqrt(σ² + eps) · weight + bias, each feature of (..., dim) with the μ and biased σ² of all its tokens.

    It leaks the future in training: a token is normalised with the statistics of the whole batch, later tokens of
    its own sequence included, so that a training loss looks better than what the model can do. In evaluation μ and
    σ² are running averages, and no token sees another.

    A training step moves the averages by `momentum` in torch's sense, new = (1 − momentum)·old + momentum·batch,
    with the unbiased σ²; a batch of no tokens leaves them alone, and one of a single token, which has no variance,
    raises ValueError.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int, eps: float = 1e-5, *, momentum: float = 0.1):
        super().__init__()
        check_arguments(dim, eps=eps)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum of batchnorm must be above 0 and at most 1, not {momentum}")
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.register_buffer("running_mean", torch.empty(dim))
        self.register_buffer("running_var", torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)

    def forward(self, x: Tensor) -> Tensor:
        count = x.numel() // len(self.weight)
        if not (self.training and count):
            given = self.running_mean, self.running_var
            return normalise(self.formula, x, self.weight, self.bias, self.eps, *given)[0]
        if count < 2:
            raise ValueError("batchnorm cannot train on a batch of one token: it has no variance")
        y, mean, var = normalise(self.formula, x, self.weight, self.bias, self.eps)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), self.momentum)
        return y

    def formula(self, x: Tensor, weight: Tensor, bias: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = upcast(x)
        mean, var = (tensor.to(h.dtype) for tensor in given or statistics(h.reshape(-1, h.shape[-1])))
        return ((h - mean) * torch.rsqrt(var + self.eps) * weight + bias).to(x.dtype), mean, var


def statistics(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of (N, dim) over N."""
    mean = tokens.mean(0)
    # What rounding left out of the mean: far from zero it would otherwise make up the variance of a constant.
    mean = mean + (tokens - mean).mean(0).detach()
    return mean, (tokens - mean).square().mean(0)
