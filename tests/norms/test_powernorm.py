"""PowerNorm: running statistics, the paper's backward pass, and warmup."""

import pytest
import torch
from torch import Tensor

from norms.powernorm import PowerNorm
from tests.random_values import normal, randomize


def mean_square(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The running mean square in evaluation; in training, that of all tokens of x, as during warmup."""
    if "running_square" in state:
        return state["running_square"]
    tokens = x.reshape(-1, x.shape[-1])
    return tokens.pow(2).sum(0) / len(tokens)


def oracle(x: Tensor, state: dict[str, Tensor], eps: float = 1e-5) -> Tensor:
    return x / (mean_square(x, state) + eps).sqrt() * state["weight"] + state["bias"]


def error_bound(x: Tensor, state: dict[str, Tensor], eps: float, **norm_args) -> Tensor:
    """Three roundings of the quotient and the gain, one of the sum. Measured: 0.8 of this bound."""
    normalized = oracle(x, {**state, "bias": torch.zeros_like(state["bias"])})
    return eps * (3 * normalized.abs() + state["bias"].abs())


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("momentum", [0.9, 0.6])
def test_training_steps_match_the_papers_algorithm(warmup, momentum):
    """Algorithm 2 of the paper, with its Γ, Λ and ν; then a step in evaluation."""
    norm, eps = randomize(PowerNorm(8, momentum=momentum, warmup=warmup).double()).train(), 1e-5
    psi_squared, nu = torch.ones(8).double(), torch.zeros(8).double()
    for step in range(7):
        x, grad_y = (3 * normal(6, 8, seed=100 * step + draw).double() + 1 for draw in (10, 11))
        y = norm(x.requires_grad_())
        grads = torch.autograd.grad(y, (x, norm.weight, norm.bias), grad_y)
        batch = (x.detach() ** 2).sum(0) / 6
        psi = ((batch if step < warmup else psi_squared) + eps) ** 0.5
        hat, grad_hat = x.detach() / psi, grad_y * norm.weight.detach()
        expected = (grad_hat - nu * hat) / psi, (grad_y * hat).sum(0), grad_y.sum(0)
        torch.testing.assert_close(y, hat * norm.weight + norm.bias, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads, expected, rtol=1e-11, atol=1e-11)
        gamma, lambda_ = (hat * hat).sum(0) / 6, (grad_hat * hat).sum(0) / 6
        nu = nu * (1 - (1 - momentum) * gamma) + (1 - momentum) * lambda_
        # Unlike in the paper: a plain average over the first batches.
        psi_squared = psi_squared + max(1 - momentum, 1 / (step + 1)) * (batch - psi_squared)
        torch.testing.assert_close(norm.running_square, psi_squared, rtol=1e-13, atol=0)
        torch.testing.assert_close(norm.running_projection, nu, rtol=1e-11, atol=0)
        assert norm.batches.item() == step + 1
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    x = normal(2, 3, 8, seed=5).double()
    expected = x / (psi_squared + eps) ** 0.5 * norm.weight + norm.bias
    torch.testing.assert_close(norm.eval()(x), expected, rtol=0, atol=1e-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in norm.state_dict().items())


def test_overflowed_gradient_is_ignored():
    """The initial float16 loss scale is too large. The optimizer skips such steps, and ν must skip them too."""
    norm, x = PowerNorm(8), normal(4, 5, 8).requires_grad_()
    norm(x).sum().backward()
    before = norm.running_projection.clone()
    grad_y = torch.ones(4, 5, 8)
    grad_y[0, 0, 3] = torch.inf
    norm(x).backward(grad_y)
    assert norm.running_projection[3] == before[3] and (norm.running_projection != before).sum() == 7
