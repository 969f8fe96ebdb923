"""LayerNorm for images, compared with a float64 formula per pixel and with InstanceNorm."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from norms.modules import ChannelsFirstLayerNorm


def image() -> Tensor:
    return torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1


def randomized(norm: nn.Module) -> Any:
    for seed, parameter in enumerate(norm.parameters()):
        parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return norm.double()


def standardized(values: Tensor, eps: float = 1e-5) -> Tensor:
    mean = values.sum() / values.numel()
    return (values - mean) / ((values - mean).pow(2).sum() / values.numel() + eps).sqrt()


def test_layernorm_normalizes_the_channels_of_each_pixel():
    norm, x = randomized(ChannelsFirstLayerNorm(3)), image()
    y = norm(x)
    for b in range(2):
        for i in range(4):
            for j in range(5):
                expected = standardized(x[b, :, i, j]) * norm.weight + norm.bias
                torch.testing.assert_close(y[b, :, i, j], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_computes_in_fp32_and_keeps_shape_and_dtype(dtype):
    norm, x = ChannelsFirstLayerNorm(3), image().to(dtype)
    assert norm(x).dtype == dtype and norm(x).shape == x.shape
    assert torch.equal(norm(x), norm(x.float()).to(dtype))


def test_instance_norm_is_over_the_pixels_of_each_channel():
    """Articles call it LayerNorm for images, which is another function."""
    x = image()
    theirs = torch.nn.InstanceNorm2d(3)(x)
    torch.testing.assert_close(theirs[0, 1], standardized(x[0, 1]))
    assert (theirs - ChannelsFirstLayerNorm(3).double()(x)).abs().max() > 0.1
