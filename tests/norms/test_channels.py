"""LayerNorm for images, compared with a float64 formula per pixel."""

import itertools

import pytest
import torch
from torch import Tensor

from norms.modules import ChannelsFirstLayerNorm
from tests.random_values import normal, randomize


def standardized(values: Tensor, eps: float = 1e-5) -> Tensor:
    mean = values.sum() / values.numel()
    return (values - mean) / ((values - mean).pow(2).sum() / values.numel() + eps).sqrt()


def test_layernorm_normalizes_the_channels_of_each_pixel():
    norm, x = randomize(ChannelsFirstLayerNorm(3).double()), 3 * normal(2, 3, 4, 5).double() + 1
    y = norm(x)
    for b, i, j in itertools.product(range(2), range(4), range(5)):
        expected = standardized(x[b, :, i, j]) * norm.weight + norm.bias
        torch.testing.assert_close(y[b, :, i, j], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_computes_in_fp32_and_keeps_the_dtype(dtype):
    norm, x = ChannelsFirstLayerNorm(3), normal(2, 3, 4, 5, dtype=dtype)
    assert norm(x).dtype == dtype and torch.equal(norm(x), norm(x.float()).to(dtype))
