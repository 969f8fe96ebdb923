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


def randomized(**norm_args) -> PowerNorm:
    return randomize(PowerNorm(8, **norm_args).double()).train()


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("momentum", [0.9, 0.6])
def test_training_steps_match_the_papers_algorithm(warmup, momentum):
    """Algorithm 2 of the paper, with its Γ, Λ and ν, by feature and token; then a step in evaluation."""
    norm = randomized(momentum=momentum, warmup=warmup)
    gain, bias, eps = norm.weight.tolist(), norm.bias.tolist(), 1e-5
    psi_squared, nu = [1.0] * 8, [0.0] * 8
    for step in range(7):
        x, grad_y = (3 * normal(2, 3, 8, seed=100 * step + draw).double() + 1 for draw in (10, 11))
        x.requires_grad_()
        y = norm(x)
        grads = torch.autograd.grad(y, (x, norm.weight, norm.bias), grad_y)
        y, grad_x, grad_gain, grad_bias = (tensor.reshape(-1, 8) for tensor in (y, *grads))
        tokens, incoming = x.detach().view(6, 8).tolist(), grad_y.view(6, 8).tolist()
        for f in range(8):
            batch = sum(token[f] ** 2 for token in tokens) / 6
            psi = ((batch if step < warmup else psi_squared[f]) + eps) ** 0.5
            hat = [token[f] / psi for token in tokens]
            grad_hat = [g[f] * gain[f] for g in incoming]
            for i in range(6):
                assert y[i, f].item() == pytest.approx(hat[i] * gain[f] + bias[f], rel=1e-12, abs=1e-12)
                expected = (grad_hat[i] - nu[f] * hat[i]) / psi
                assert grad_x[i, f].item() == pytest.approx(expected, rel=1e-11, abs=1e-11)
            assert grad_gain[0, f].item() == pytest.approx(sum(g[f] * h for g, h in zip(incoming, hat, strict=True)))
            assert grad_bias[0, f].item() == pytest.approx(sum(g[f] for g in incoming))
            gamma = sum(h * h for h in hat) / 6
            lambda_ = sum(g * h for g, h in zip(grad_hat, hat, strict=True)) / 6
            nu[f] = nu[f] * (1 - (1 - momentum) * gamma) + (1 - momentum) * lambda_
            rate = max(1 - momentum, 1 / (step + 1))  # unlike the paper: a plain average over the first batches
            psi_squared[f] += rate * (batch - psi_squared[f])
        assert norm.running_square.tolist() == pytest.approx(psi_squared, rel=1e-13)
        assert norm.running_projection.tolist() == pytest.approx(nu, rel=1e-11)
        assert norm.batches.item() == step + 1
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    x = normal(2, 3, 8, seed=5).double()
    expected = x / (torch.tensor(psi_squared, dtype=torch.float64) + eps).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm.eval()(x), expected, rtol=0, atol=1e-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in norm.state_dict().items())


def test_running_statistics_are_fp32_and_do_not_require_grad():
    norm, x = PowerNorm(8), (3 * normal(64, 64, 8) + 1).bfloat16().requires_grad_()
    norm(x).sum().backward()
    for statistic in (norm.running_square, norm.running_projection):
        assert statistic.dtype == torch.float32 and not statistic.requires_grad
    expected = x.detach().double().square().mean((0, 1)).float()
    torch.testing.assert_close(norm.running_square, expected, rtol=1e-6, atol=0)


def test_overflowed_gradient_is_ignored():
    """The initial float16 loss scale is too large. The optimizer skips such steps, and ν must skip them too."""
    norm, x = PowerNorm(8), normal(4, 5, 8).requires_grad_()
    norm(x).sum().backward()
    before = norm.running_projection.clone()
    grad_y = torch.ones(4, 5, 8)
    grad_y[0, 0, 3] = torch.inf
    norm(x).backward(grad_y)
    assert norm.running_projection[3] == before[3] and (norm.running_projection != before).sum() == 7
