"""What people do to a model: hooks, torch.func, pickle."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from config import ModelConfig
from model import Llama
from norms import KINDS, build_norm

CONFIG = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, hidden_dim=48, context=16, vocab_size=29)
TOKENS = torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()


@pytest.fixture
def model() -> Llama:
    model = Llama(CONFIG)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    return model


def cached_logits(model: Llama) -> Tensor:
    """Logits after a prompt and one more token."""
    with torch.inference_mode():
        cache = model.new_cache()
        model.next_logits(INPUTS[:, :5], cache)
        return model.next_logits(INPUTS[:, 5:6], cache)


PATHS = [
    f"layers.1.{path}_proj" for path in ("self_attn.q", "self_attn.k", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
]


@pytest.mark.parametrize("path", [*PATHS, "lm_head"])
def test_a_hook_on_a_projection_runs_and_takes_effect(model, path):
    """In training and in generation with a cache."""
    calls, before = [], cached_logits(model)

    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        calls.append(output.shape)
        return 0 * output

    handle = model.get_submodule(path).register_forward_hook(hook)
    model.loss(INPUTS, TARGETS).backward()
    assert len(calls) == 1
    assert not torch.allclose(cached_logits(model), before)
    assert len(calls) == 3  # a prompt and one more token
    handle.remove()
    assert torch.equal(cached_logits(model), before)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_torch_func_on_a_norm(kind):
    norm, x = build_norm(kind, 32).eval(), torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0))
    one_by_one = torch.stack([norm(row) for row in x])
    torch.testing.assert_close(torch.func.vmap(norm)(x), one_by_one, rtol=1e-6, atol=1e-6)
    leaf, weights = x[0, 0].clone().requires_grad_(), torch.linspace(-1, 1, 32)
    (expected,) = torch.autograd.grad((norm(leaf) * weights).sum(), leaf)
    jacobian = torch.func.jacrev(norm)(x[0, 0])
    torch.testing.assert_close(weights @ jacobian, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(jacobian, torch.func.jacfwd(norm)(x[0, 0]), rtol=1e-5, atol=1e-6)


def test_pickle_and_deepcopy_keep_the_tied_head(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(other) is type(model) and torch.equal(cached_logits(other), cached_logits(model))
        other.embed_tokens.weight.data.zero_()
        assert other.lm_head.weight is other.embed_tokens.weight
    assert model.embed_tokens.weight.abs().sum() > 0
