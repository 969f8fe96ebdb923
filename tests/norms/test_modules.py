"""LayerNorm for images, in a recurrent network and in an MLP, compared with formulas in float64."""

import torch

from norms.dyt import DyT
from norms.modules import ChannelsFirstLayerNorm, LayerNormRNN, NormMLP
from tests.norms.test_layernorm import oracle
from tests.random_values import normal, randomize


def test_layernorm_normalizes_the_channels_of_each_pixel():
    norm, x = randomize(ChannelsFirstLayerNorm(3).double()), 3 * normal(2, 3, 4, 5).double() + 1
    expected = oracle(x.movedim(1, -1), norm.state_dict()).movedim(-1, 1)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-13)


def test_each_step_of_an_rnn_matches_the_papers_formula():
    """It continues from a given state."""
    rnn, x = randomize(LayerNormRNN(3, 5, eps=0.1).double()), normal(2, 7, 3, seed=9).double()
    weights, y = rnn.state_dict(), rnn(x)
    h = torch.zeros(2, 5, dtype=torch.float64)
    for t in range(7):
        a = h @ weights["hidden.weight"].T + x[:, t] @ weights["input.weight"].T
        h = oracle(a, rnn.norm.state_dict(), eps=0.1).tanh()
        torch.testing.assert_close(y[:, t], h, rtol=0, atol=1e-13)
    torch.testing.assert_close(rnn(x[:, 3:], y[:, 2]), y[:, 3:])


def test_an_mlp_is_linear_norm_relu_linear():
    torch.manual_seed(0)
    mlp, x = NormMLP().double(), torch.randn(150, 4, dtype=torch.float64)
    weights = mlp.state_dict()
    assert [tuple(tensor.shape) for tensor in weights.values()] == [(8, 4), (8,), (8,), (8,), (3, 8), (3,)]
    h = oracle(x @ weights["0.weight"].T + weights["0.bias"], mlp[1].state_dict()).clamp_min(0)
    torch.testing.assert_close(mlp(x), h @ weights["3.weight"].T + weights["3.bias"], rtol=0, atol=1e-13)
    assert isinstance(NormMLP(norm="dyt")[1], DyT)
