"""Linear → norm → ReLU → Linear, trained on 150 flowers."""

import pytest
import torch
from torch import Tensor, nn

from norms.modules.mlp import NormMLP


def flowers(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A synthetic data set like Iris: (150, 4) measurements of 50 flowers of each of three classes, and the classes.

    As in Iris, one class is separate and the other two overlap slightly.
    """
    generator = torch.Generator().manual_seed(seed)
    centers = torch.tensor([[5.0, 3.4, 1.5, 0.3], [5.9, 2.8, 4.2, 1.3], [6.6, 3.0, 5.6, 2.0]])
    classes = torch.arange(3).repeat_interleave(50)
    return centers[classes] + 0.35 * torch.randn(150, 4, generator=generator), classes


def test_is_linear_norm_relu_linear():
    torch.manual_seed(0)
    mlp, x = NormMLP().double(), flowers()[0].double()
    weights = mlp.state_dict()
    assert [tuple(tensor.shape) for tensor in weights.values()] == [(8, 4), (8,), (8,), (8,), (3, 8), (3,)]
    a = x @ weights["0.weight"].T + weights["0.bias"]
    a = (a - a.mean(1, keepdim=True)) / (a.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    h = (a * weights["1.weight"] + weights["1.bias"]).clamp_min(0)
    torch.testing.assert_close(mlp(x), h @ weights["3.weight"].T + weights["3.bias"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("norm", ["batchnorm", "derf", "dyt", "layernorm", "none", "rmsnorm", "scalenorm"])
def test_learns_to_classify_unseen_flowers(norm):
    """100 full-batch steps of Adam at 0.01. Chance is 1/3; two classes overlap, so the best accuracy is near 0.97."""
    torch.manual_seed(0)
    mlp, (x, classes) = NormMLP(norm=norm), flowers(0)
    start = {name: tensor.clone() for name, tensor in mlp.named_parameters()}
    optimizer = torch.optim.Adam(mlp.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(mlp(x), classes).backward()
        optimizer.step()
    assert all(not torch.equal(parameter, start[name]) for name, parameter in mlp.named_parameters())
    unseen, unseen_classes = flowers(1)
    assert (mlp.eval()(unseen).argmax(1) == unseen_classes).float().mean() > 0.9
