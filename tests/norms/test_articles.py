"""Mistakes in the source articles: each test shows that their version fails and ours is right.

The articles, by file number: 000 Understanding Layer Normalization, 001 a definition of LayerNorm, 002 chapter 14 of
a book about a small framework, 003 a guide to three norms, 004 an annotated LayerNorm.
"""

import pytest
import torch
from torch import Tensor, nn

from norms.batchnorm import BatchNorm
from norms.layernorm import LayerNorm
from norms.modules import ChannelsFirstLayerNorm, LayerNormRNN
from norms.rmsnorm import RMSNorm


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def standardized(x: Tensor, *axes: int, eps: float = 1e-5) -> Tensor:
    var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    return (x - mean) / (var + eps).sqrt()


# --- 000 -------------------------------------------------------------------------------------------------------------


def test_000_eps_outside_sqrt_has_nan_gradient_at_zero():
    theirs, ours = torch.zeros(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    (theirs / (theirs.square().mean(-1, keepdim=True).sqrt() + 1e-5)).sum().backward()
    RMSNorm(8)(ours).sum().backward()
    assert theirs.grad is not None and theirs.grad.isnan().all()
    assert ours.grad is not None and ours.grad.isfinite().all()


def test_000_layernorm_for_images_is_instance_norm():
    x = random(2, 3, 4, 5) + random(3, 1, 1, seed=1)
    theirs = standardized(x, 2, 3)
    torch.testing.assert_close(theirs, torch.nn.InstanceNorm2d(3)(x))
    assert (theirs - ChannelsFirstLayerNorm(3)(x)).abs().max() > 0.1


def test_000_layernorm_for_rnns_has_no_recurrence():
    """Theirs has no recurrence, so a step does not depend on the steps before it; in ours it does."""
    x, recurrent = random(2, 6, 8), LayerNormRNN(8, 8)
    changed = torch.cat((x[:, :1] + 1, x[:, 1:]), 1)
    assert torch.equal(standardized(x, -1)[:, 1:], standardized(changed, -1)[:, 1:])
    assert not torch.equal(recurrent(x)[:, 1:], recurrent(changed)[:, 1:])


# --- 001 -------------------------------------------------------------------------------------------------------------


def test_001_numerical_example():
    """The numbers in the article are lost; of these the mean is 8 and the deviation 5. It omits eps."""
    norm = LayerNorm(4, eps=1e-12)
    for parameter, value in zip(norm.parameters(), (2, 1), strict=True):
        nn.init.constant_(parameter, value)
    torch.testing.assert_close(norm(torch.tensor([1.0, 7.0, 9.0, 15.0])), torch.tensor([-1.8, 0.6, 1.4, 3.8]))


def test_001_statistics_over_the_whole_sample_leak_future_tokens():
    x = random(2, 6, 8)
    changed = x.clone()
    changed[:, -1] += 1
    assert not torch.equal(standardized(x, 1, 2)[:, :-1], standardized(changed, 1, 2)[:, :-1])
    norm = LayerNorm(8)
    assert torch.equal(norm(x)[:, :-1], norm(changed)[:, :-1])


# --- 002 -------------------------------------------------------------------------------------------------------------


def test_002_multi_axis_shape_with_statistics_over_the_last_axis():
    x = random(2, 3, 8) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    theirs, ours = standardized(x, -1), LayerNorm((3, 8))(x)
    torch.testing.assert_close(ours, standardized(x, 1, 2))
    assert (theirs - ours).abs().max() > 0.5


def test_002_batchnorm_over_the_first_axis_has_statistics_per_step():
    x = random(16, 5, 8) + 10 * torch.arange(5.0)[:, None]  # the features drift along the sequence
    assert standardized(x, 0).mean(0).abs().max() < 1e-5  # theirs removes the drift
    torch.testing.assert_close(BatchNorm(8)(x), standardized(x, 0, 1))


# --- 003 -------------------------------------------------------------------------------------------------------------


def test_003_bias_initialized_to_one_shifts_the_output():
    x = random(4, 6, 8)
    assert (standardized(x, -1) + torch.ones(8)).mean().item() == pytest.approx(1, abs=1e-6)
    assert all(norm(x).mean().item() == pytest.approx(0, abs=1e-6) for norm in (LayerNorm(8), BatchNorm(8)))


def test_003_without_running_statistics_evaluation_depends_on_the_batch():
    x, norm = random(4, 6, 8), BatchNorm(8)
    norm(x)
    norm.eval()
    assert not torch.allclose(standardized(x, 0, 1)[:1], standardized(x[:1], 0, 1), atol=0.1)
    assert torch.equal(norm(x)[:1], norm(x[:1]))


def test_003_momentum_is_the_weight_of_the_old_value():
    """Their 0.9 is 0.1 here, in 002 and in torch. Confusing the two makes the statistics follow the last batch."""
    x, norm = random(64, 8) + 5, BatchNorm(8, momentum=0.1)
    norm(x)
    theirs = 0.1 * torch.zeros(8) + (1 - 0.1) * x.mean(0)
    assert theirs.min() > 4
    torch.testing.assert_close(norm.running_mean, 0.1 * x.mean(0))


# --- 004 -------------------------------------------------------------------------------------------------------------


def test_004_difference_of_means_cancels():
    """At a mean of 1000 it is off by more than 0.1."""
    x = random(64, 512) + 1000
    mean, exact = x.mean(-1, keepdim=True), standardized(x.double(), -1)
    theirs = (x - mean) / ((x**2).mean(-1, keepdim=True) - mean**2 + 1e-5).sqrt()
    assert (theirs - exact).abs().max() > 0.1
    assert (LayerNorm(512)(x) - exact).abs().max() < 1e-3
