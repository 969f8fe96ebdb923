"""Norms for images, (B, C, H, W)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from norms.layernorm import LayerNorm
from norms.numerics import check_arguments, upcast


class ChannelsFirstLayerNorm(LayerNorm):
    """LayerNorm over the C channels of each pixel, (B, C, ...) → (B, C, ...), as in ConvNeXt, arXiv 2201.03545."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class InstanceNorm(nn.Module):
    """(x − μ) / sqrt(σ² + eps) · weight + bias, with μ and biased σ² over the pixels of each channel of each image.

    (B, C, ...) → (B, C, ...), one weight and bias per channel. Instance Normalization, arXiv 1607.08022. It is
    sometimes called LayerNorm for convolutional networks, but unlike LayerNorm it has statistics per channel.
    """

    def __init__(self, channels: int, eps: float = 1e-5):
        super().__init__()
        check_arguments(channels, eps=eps)
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        h = upcast(x.movedim(1, -1), len(self.weight)).movedim(-1, 1)
        y = F.layer_norm(h, h.shape[2:], eps=self.eps)
        return (y.movedim(1, -1) * self.weight + self.bias).movedim(-1, 1).to(x.dtype)
