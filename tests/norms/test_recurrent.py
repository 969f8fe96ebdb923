"""LayerNorm in a recurrent network, compared with the recurrence in NumPy."""

import numpy as np
import torch
from torch import Tensor

from norms.modules import LayerNormRNN
from tests.random_values import normal, randomize


def cell() -> LayerNormRNN:
    return randomize(LayerNormRNN(3, 5).double())


def sequence() -> Tensor:
    return normal(2, 7, 3, seed=9).double()


def test_each_step_matches_the_papers_formula():
    rnn, x = cell(), sequence()
    weights = {name: tensor.numpy() for name, tensor in rnn.state_dict().items()}
    for b in range(2):
        h = np.zeros(5)
        for t in range(7):
            a = weights["hidden.weight"] @ h + weights["input.weight"] @ x[b, t].numpy()
            a = (a - a.mean()) / np.sqrt(((a - a.mean()) ** 2).mean() + 1e-5)
            h = np.tanh(weights["norm.weight"] * a + weights["norm.bias"])
            np.testing.assert_allclose(rnn(x)[b, t].detach().numpy(), h, rtol=0, atol=1e-13)


def test_continues_from_a_given_state():
    rnn, x = cell(), sequence()
    first = rnn(x[:, :3])
    torch.testing.assert_close(torch.cat([first, rnn(x[:, 3:], first[:, -1])], 1), rnn(x))


def test_gradcheck():
    x = sequence()[:, :3].clone().requires_grad_()
    assert torch.autograd.gradcheck(cell(), x)
