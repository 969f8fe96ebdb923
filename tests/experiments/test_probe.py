"""The probe against a float64 model whose streams and gradients are computed step by step."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from config import ModelConfig
from experiments.probe import probe
from model import Llama
from norms.placement import PLACEMENTS

LAYERS, VOCAB = 3, 20


def make_model(norm: str = "rmsnorm", placement: str = "pre", **fields) -> Llama:
    """A tiny model whose gains are not all one, and some of them negative."""
    config = ModelConfig(
        norm=norm, placement=placement, dim=16, layers=LAYERS, heads=2, context=8, vocab_size=VOCAB, **fields
    )
    model = Llama(config, seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1).mul_(torch.randn_like(weight).sign())
    return model


def make_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(VOCAB, (4, 9))
    return ids[:, :-1], ids[:, 1:]


def streams_and_loss(model: Llama, tokens: Tensor, targets: Tensor) -> tuple[list, Tensor]:
    """The residual stream before the first block and after each block, and the loss from log-probabilities."""
    stream = PLACEMENTS[model.config.placement].init_stream(model.embed_tokens.weight[tokens])
    streams, rope = [stream], model.rope(0, tokens.shape[1])
    for block in model.layers:
        stream = block(stream, rope)
        streams.append(stream)
    log_probabilities = (model.final_norm(stream) @ model.lm_head.weight.T).log_softmax(-1)
    return streams, -log_probabilities.gather(-1, targets[..., None]).mean()


def rms(x: Tensor) -> float:
    return math.sqrt(sum(value * value for value in x.flatten().tolist()) / x.numel())


# fp32 rounds at 6e-8. Three blocks, whose norms divide small differences, amplify that about a hundredfold.
TOLERANCE = 1e-5


@pytest.mark.parametrize("norm, placement", [("rmsnorm", "pre"), ("layernorm", "siamese"), ("batchnorm", "post")])
def test_statistics_match_float64(norm, placement):
    model, (tokens, targets) = make_model(norm, placement), make_batch()
    exact = copy.deepcopy(model).double().train()
    streams, loss = streams_and_loss(exact, tokens, targets)
    loss.backward()
    seen = probe(model, tokens, targets)

    assert [block.block for block in seen] == list(range(LAYERS + 1))
    parts: list[nn.Module] = [exact.embed_tokens, *exact.layers]
    for block, stream, part in zip(seen, streams, parts, strict=True):
        first, second = stream if isinstance(stream, tuple) else (stream, None)
        assert block.residual_rms == pytest.approx(rms(first), rel=TOLERANCE)
        assert (block.second_rms is None) == (second is None)
        if second is not None:
            assert block.second_rms == pytest.approx(rms(second), rel=TOLERANCE)
        squares = sum(float(weight.grad.square().sum()) for weight in part.parameters() if weight.grad is not None)
        assert block.grad_norm == pytest.approx(math.sqrt(squares), rel=TOLERANCE)

    for block, part in zip(seen[1:], exact.layers, strict=True):
        gains = torch.cat(
            [weights for name, weights in part.named_parameters() if "norm" in name and name.endswith(".weight")]
        )
        assert len(gains) == {"pre": 2, "siamese": 6, "post": 2}[placement] * 16
        expected = gains.abs().mean().item(), gains.abs().min().item(), gains.abs().max().item()
        assert (block.gain_mean, block.gain_min, block.gain_max) == pytest.approx(expected, rel=TOLERANCE)
    assert (seen[0].gain_mean, seen[0].gain_min, seen[0].gain_max) == (None, None, None)


def test_earlier_gradients_do_not_count_and_hooks_are_removed():
    """Norms without gains have no statistics of gains."""
    model, batch = make_model(norm_args={"elementwise_affine": False}), make_batch()
    first = probe(model, *batch)
    model.loss(*batch).backward()
    assert probe(model, *batch) == first and {block.gain_mean for block in first} == {None}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
