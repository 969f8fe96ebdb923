"""BatchNorm: statistics over batch and time, and running statistics in evaluation."""

import pytest
import torch
from torch import Tensor

from norms.batchnorm import BatchNorm
from tests.random_values import normal, randomize


def statistics(x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance: the running ones in evaluation, those of all tokens of x in training."""
    if "running_mean" in state:
        return state["running_mean"], state["running_var"]
    tokens = x.reshape(-1, x.shape[-1])
    mean = tokens.sum(0) / len(tokens)
    return mean, (tokens - mean).pow(2).sum(0) / len(tokens)


def oracle(x: Tensor, state: dict[str, Tensor], eps: float = 1e-5) -> Tensor:
    mean, variance = statistics(x, state)
    return (x - mean) / (variance + eps).sqrt() * state["weight"] + state["bias"]


def error_bound(x: Tensor, state: dict[str, Tensor], eps: float, **norm_args) -> Tensor:
    """LayerNorm's bound, with the statistics of each feature."""
    mean, variance = statistics(x, state)
    std = (variance + norm_args.get("eps", 1e-5)).sqrt()
    normalized = ((x - mean) / std).abs()
    return 2 * eps * (1 + mean.abs() / std) * ((1 + normalized) * state["weight"].abs() + state["bias"].abs())


@pytest.mark.parametrize("norm_args", [{}, {"momentum": 1.0, "eps": 1e-2}], ids=str)
def test_training_steps_and_evaluation_match_torch(norm_args):
    ours, theirs = BatchNorm(8, **norm_args).double(), torch.nn.BatchNorm1d(8, **norm_args).double()
    randomize(ours).train()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    for step in range(6):
        x = ((3 * normal(4, 5, 8, seed=step).double() + 1) * (step + 1)).requires_grad_()
        torch.testing.assert_close(ours(x), theirs(x.flatten(0, 1)).view_as(x), rtol=0, atol=1e-13)
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-14, atol=1e-14)
            assert not getattr(ours, name).requires_grad, "it would keep the graphs of all steps"
    before = [tensor.clone() for tensor in ours.state_dict().values()]
    x = normal(4, 5, 8, seed=50).double()
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x.flatten(0, 1)).view_as(x), rtol=0, atol=1e-13)
    assert all(map(torch.equal, ours.state_dict().values(), before)), "nothing moves in evaluation"


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 8), (8,)])
def test_training_on_one_token_is_refused(shape):
    norm = BatchNorm(8)
    with pytest.raises(ValueError, match="batch of one token"):
        norm(torch.ones(shape))
    assert torch.equal(norm.running_mean, torch.zeros(8)) and torch.equal(norm.running_var, torch.ones(8))
    norm.eval()
    torch.testing.assert_close(norm(torch.ones(shape)), torch.ones(shape), rtol=1e-5, atol=0)
