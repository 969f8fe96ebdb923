"""Folded gains: the same logits from a model whose norms have no weights."""

import dataclasses

import pytest
import torch

from config import ModelConfig
from model import Llama
from norms import KINDS
from norms.placement import PLACEMENTS
from runtime.folding import FOLDABLE, fold_gains

CONFIG = ModelConfig(
    dim=16, layers=3, heads=4, kv_heads=2, hidden_dim=24, context=8, vocab_size=29, tie_embeddings=False
)
TOKENS = torch.tensor([[3, 1, 28, 0, 3, 7]])


def random_model(**changes) -> Llama:
    """All weights random, gains far from 1, in float64."""
    model = Llama(dataclasses.replace(CONFIG, **changes)).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.4)
    return model


@pytest.mark.parametrize("placement", FOLDABLE)
@pytest.mark.parametrize("norm_args", [{}, {"eps": 1e-3, "cast_order": "llama"}, {"zero_centered": True}], ids=str)
def test_logits_stay_and_gains_go(placement, norm_args):
    model = random_model(placement=placement, norm_args=norm_args)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folded = fold_gains(model)
    assert not [name for name in folded.state_dict() if "norm" in name or "finish" in name]
    with torch.no_grad():
        expected = model(TOKENS)
        assert (folded(TOKENS) - expected).abs().max() < 1e-12 * expected.abs().max()
        for weight in folded.parameters():
            weight.zero_()
    assert not folded.training and dataclasses.replace(folded.config, norm_args=norm_args) == model.config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_folded_model_generates_with_a_cache_and_can_be_trained():
    model = random_model()
    folded = fold_gains(model)
    with torch.no_grad():
        cache = folded.new_cache()
        folded.next_logits(TOKENS[:, :4], cache)
        torch.testing.assert_close(folded.next_logits(TOKENS[:, 4:], cache), model(TOKENS)[:, -1])
    folded.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in folded.parameters())


REFUSED = [
    *(({"norm": kind}, "only the gains of --norm rmsnorm can be folded") for kind in KINDS if kind != "rmsnorm"),
    ({"norm_args": {"elementwise_affine": False}}, "this model has none"),
    *(
        ({"placement": name}, f"with {name}, the output of a norm is a part of the stream")
        for name in PLACEMENTS
        if name not in FOLDABLE
    ),
    ({"qk_norm": "head"}, "the gains of --qk-norm cannot be folded"),
    ({"qk_norm": "full"}, "the gains of --qk-norm cannot be folded"),
    ({"tie_embeddings": True}, "the final gain cannot be folded into a tied head"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=str)
def test_a_gain_without_a_matrix_is_refused(changes, message):
    with pytest.raises(ValueError, match=message) as excinfo:
        fold_gains(Llama(dataclasses.replace(CONFIG, **changes)))
    assert "\n" not in str(excinfo.value)
