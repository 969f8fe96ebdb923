"""Mistakes in the source articles: each test shows that their version fails and ours is right.

The articles, by file number: 000 Understanding Layer Normalization, 001 a definition of LayerNorm, 002 chapter 14 of
a book about a small framework, 003 a guide to three norms, 004 an annotated LayerNorm.
"""

import pytest
import torch
from torch import Tensor, nn

from norms.batchnorm import BatchNorm
from norms.layernorm import LayerNorm
from norms.modules.images import ChannelsFirstLayerNorm, InstanceNorm
from norms.modules.rnn import LayerNormRNN
from norms.rmsnorm import RMSNorm


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def standardized(x: Tensor, *axes: int, eps: float = 1e-5) -> Tensor:
    var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    return (x - mean) / (var + eps).sqrt()


# --- 000 -------------------------------------------------------------------------------------------------------------


def eps_outside_sqrt(x: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True).sqrt() + eps)


def test_000_eps_outside_sqrt_has_nan_gradient_at_zero():
    theirs, ours = torch.zeros(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    eps_outside_sqrt(theirs).sum().backward()
    RMSNorm(8)(ours).sum().backward()
    assert theirs.grad is not None and theirs.grad.isnan().all()
    assert ours.grad is not None and ours.grad.isfinite().all()


def test_000_eps_outside_sqrt_differs_for_small_inputs():
    x = torch.full((8,), 1e-3)
    assert eps_outside_sqrt(x)[0].item() == pytest.approx(0.990, abs=5e-4)
    assert RMSNorm(8, 1e-5)(x)[0].item() == pytest.approx(0.302, abs=5e-4)


def test_000_layernorm_for_images_is_instance_norm():
    x = random(2, 3, 4, 5) + random(3, 1, 1, seed=1)
    theirs = standardized(x, 2, 3)
    torch.testing.assert_close(theirs, InstanceNorm(3)(x))
    assert (theirs - ChannelsFirstLayerNorm(3)(x)).abs().max() > 0.1


def test_000_layernorm_for_rnns_has_no_recurrence():
    """Theirs has no recurrence, so a step does not depend on the steps before it; in ours it does."""
    x = random(2, 6, 8)
    changed = x.clone()
    changed[:, 0] += random(8, seed=1)
    theirs = standardized(x, -1)
    torch.testing.assert_close(theirs, LayerNorm(8)(x))
    assert torch.equal(theirs[:, 1:], standardized(changed, -1)[:, 1:])
    torch.manual_seed(0)
    recurrent = LayerNormRNN(8, 8)
    assert not torch.equal(recurrent(x)[:, 1:], recurrent(changed)[:, 1:])


# --- 001 -------------------------------------------------------------------------------------------------------------


def test_001_numerical_example():
    """The numbers in the article are lost; with these the mean and deviation are integers."""
    x = torch.tensor([1.0, 7.0, 9.0, 15.0], dtype=torch.float64)
    mean = x.sum() / 4
    assert mean == 8
    std = ((49 + 1 + 1 + 49) / 4) ** 0.5
    assert std == 5
    normalized = torch.tensor([-7 / 5, -1 / 5, 1 / 5, 7 / 5], dtype=torch.float64)
    torch.testing.assert_close((x - mean) / std, normalized)
    gain, bias = 2, 1
    expected = torch.tensor([-1.8, 0.6, 1.4, 3.8], dtype=torch.float64)
    torch.testing.assert_close(gain * normalized + bias, expected)

    norm = LayerNorm(4, eps=1e-12).double()  # the article omits eps, since the deviation is not 0
    torch.testing.assert_close(norm(x), normalized)
    for parameter, value in zip(norm.parameters(), (gain, bias), strict=True):
        nn.init.constant_(parameter, value)
    torch.testing.assert_close(norm(x), expected)


def test_001_statistics_over_the_whole_sample_leak_future_tokens():
    x = random(2, 6, 8)
    changed = x.clone()
    changed[:, -1] += 1
    assert not torch.equal(standardized(x, 1, 2)[:, :-1], standardized(changed, 1, 2)[:, :-1])
    norm = LayerNorm(8)
    assert torch.equal(norm(x)[:, :-1], norm(changed)[:, :-1])


def test_001_original_transformer_is_post_norm():
    from norms.placement import PLACEMENTS, Site

    residual = PLACEMENTS["post"].connection(Site("mlp", 0, 1, 8, lambda site: LayerNorm(8)))
    x, sublayer = random(2, 6, 8), nn.Linear(8, 8)
    torch.testing.assert_close(residual(x, sublayer), standardized(x + sublayer(x), -1))


# --- 002 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [RMSNorm(8), BatchNorm(8)], ids=["rmsnorm", "batchnorm"])
def test_002_output_is_detached_from_the_graph(norm):
    def theirs(x: Tensor) -> Tensor:
        return norm(x.detach()).detach().requires_grad_()  # a new tensor, detached from the graph

    x = random(3, 4, 8).requires_grad_()
    theirs(x).pow(3).sum().backward()
    assert x.grad is None and norm.weight.grad is None
    norm(x).pow(3).sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 1e-3
    assert norm.weight.grad is not None and norm.weight.grad.abs().max() > 1e-3


def test_002_multi_axis_shape_with_statistics_over_the_last_axis():
    x = random(2, 3, 8) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    theirs, ours = standardized(x, -1), LayerNorm((3, 8))(x)
    torch.testing.assert_close(ours, standardized(x, 1, 2))
    assert (theirs - ours).abs().max() > 0.5


def test_002_batchnorm_over_the_first_axis_has_statistics_per_step():
    x = random(16, 5, 8) + 10 * torch.arange(5.0)[:, None]  # the features drift along the sequence
    theirs, ours = standardized(x, 0), BatchNorm(8)(x)
    torch.testing.assert_close(theirs.mean(0), torch.zeros(5, 8), rtol=0, atol=1e-5)  # theirs removes the drift
    assert ours.mean(0)[0].max() < -1 < 1 < ours.mean(0)[-1].min()  # ours keeps it
    torch.testing.assert_close(ours, standardized(x, 0, 1))


# --- 003 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [LayerNorm(8), BatchNorm(8)], ids=["layernorm", "batchnorm"])
def test_003_bias_initialized_to_one_shifts_the_output(ours):
    x = random(4, 6, 8)
    theirs = standardized(x, -1) + torch.ones(8)
    assert theirs.mean().item() == pytest.approx(1, abs=1e-6)
    assert ours(x).mean().item() == pytest.approx(0, abs=1e-6)


def test_003_without_running_statistics_evaluation_depends_on_the_batch():
    x, norm = random(4, 6, 8), BatchNorm(8)
    norm(x)
    norm.eval()
    assert not torch.allclose(standardized(x, 0, 1)[:1], standardized(x[:1], 0, 1), atol=0.1)
    assert torch.equal(norm(x)[:1], norm(x[:1]))


@pytest.mark.parametrize("ours", [LayerNorm(8), RMSNorm(8), BatchNorm(8)], ids=["layernorm", "rmsnorm", "batchnorm"])
def test_003_output_gets_an_extra_axis(ours):
    x, gain = random(4, 8), torch.ones(8)
    assert (gain.unsqueeze(0).unsqueeze(1) * standardized(x, -1)).shape == (1, 4, 8)
    assert ours(x).shape == (4, 8)


def test_003_momentum_is_the_weight_of_the_old_value():
    """Their 0.9 is 0.1 here, in 002 and in torch. Confusing the two makes the statistics follow the last batch."""
    x, norm = random(64, 8) + 5, BatchNorm(8, momentum=0.1)
    norm(x)
    theirs = 0.1 * torch.zeros(8) + (1 - 0.1) * x.mean(0)
    assert theirs.min() > 4
    torch.testing.assert_close(norm.running_mean, 0.1 * x.mean(0))


def test_003_rmsnorm_is_not_more_robust_to_outliers():
    """With one value of 100 among 512, the others shrink to 0.22 of their size, with or without centering."""
    x = random(512, dtype=torch.float64)
    with_outlier = x.clone()
    with_outlier[0] = 100
    for norm in (RMSNorm(512), LayerNorm(512)):
        kept = norm(with_outlier)[1:].std() / norm(x)[1:].std()
        assert kept.item() == pytest.approx(0.22, abs=0.01)


# --- 004 -------------------------------------------------------------------------------------------------------------


def mean_of_squares_minus_square_of_mean(x: Tensor, eps: float = 1e-5) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x**2).mean(-1, keepdim=True) - mean**2 + eps).sqrt()


def test_004_difference_of_means_cancels():
    x = random(64, 512)
    for mean, wrong in [(0.0, 1e-5), (1e3, 0.1)]:
        exact = standardized((x + mean).double(), -1)
        assert ((mean_of_squares_minus_square_of_mean(x + mean) - exact).abs().max() > 0.1) == (wrong == 0.1)
        assert (LayerNorm(512)(x + mean) - exact).abs().max() < 2e-7 * (1 + mean) * 5
    assert mean_of_squares_minus_square_of_mean(x + 3e4).isnan().any()
    assert LayerNorm(512)(x + 3e4).isfinite().all()


@pytest.mark.parametrize(("shape", "error"), [(8, TypeError), ([8], AssertionError)], ids=str)
def test_004_int_or_list_shape_fails(shape, error):
    x = random(4, 8)
    with pytest.raises(error):
        assert shape == x.shape[-len(shape) :]  # their check of the input
    torch.testing.assert_close(LayerNorm(shape)(x), LayerNorm(torch.Size([8]))(x), rtol=0, atol=0)
