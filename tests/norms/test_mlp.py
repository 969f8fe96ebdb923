"""Linear → norm → ReLU → Linear."""

import torch

from norms.dyt import DyT
from norms.modules import NormMLP


def test_is_linear_norm_relu_linear():
    torch.manual_seed(0)
    mlp, x = NormMLP().double(), torch.randn(150, 4, dtype=torch.float64)
    weights = mlp.state_dict()
    assert [tuple(tensor.shape) for tensor in weights.values()] == [(8, 4), (8,), (8,), (8,), (3, 8), (3,)]
    a = x @ weights["0.weight"].T + weights["0.bias"]
    a = (a - a.mean(1, keepdim=True)) / (a.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    h = (a * weights["1.weight"] + weights["1.bias"]).clamp_min(0)
    torch.testing.assert_close(mlp(x), h @ weights["3.weight"].T + weights["3.bias"], rtol=0, atol=1e-13)
    assert isinstance(NormMLP(norm="dyt")[1], DyT)
