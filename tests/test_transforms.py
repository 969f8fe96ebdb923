"""What people do to a model: hooks, replaced projections, torch.func, tracing, export, pickle."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from config import ModelConfig
from model import Linear, Llama
from norms import KINDS, TRAITS, build_norm
from runtime.acceleration import accelerate

CONFIG = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, hidden_dim=48, context=16, vocab_size=29)
TOKENS = torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()
reason = accelerate(Llama(CONFIG).eval())
needs_fast = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture(params=["plain", pytest.param("fast", marks=needs_fast)])
def model(request: pytest.FixtureRequest) -> Llama:
    """Plain, and with tokens computed in C, which must leave to the formulas what was changed."""
    model = Llama(CONFIG)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    if request.param == "fast":
        assert accelerate(model.eval()) is None
    return model


def cached_logits(model: Llama) -> Tensor:
    """Logits after a prompt and one more token."""
    with torch.inference_mode():
        cache = model.new_cache()
        model.next_logits(INPUTS[:, :5], cache)
        return model.next_logits(INPUTS[:, 5:6], cache)


@pytest.mark.parametrize("path", ["self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_a_hook_on_a_projection_runs_and_takes_effect(model, path):
    """In training and in generation with a cache."""
    calls, before = [], cached_logits(model)

    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        calls.append(output.shape)
        return torch.zeros_like(output)

    handle = model.layers[1].get_submodule(path).register_forward_hook(hook)
    model.loss(INPUTS, TARGETS).backward()
    assert len(calls) == 1
    assert not torch.allclose(cached_logits(model), before)
    assert len(calls) == 3  # a prompt and one more token
    handle.remove()
    assert torch.equal(cached_logits(model), before)


class LoRA(nn.Module):
    """A low-rank update beside a frozen projection (arXiv 2106.09685), as a user would write it."""

    def __init__(self, base: Linear):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features, generator=generator))
        self.b = nn.Parameter(torch.randn(base.out_features, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.mT @ self.b.mT


@pytest.mark.parametrize("path", ["self_attn.q_proj", "mlp.up_proj"])
def test_a_replaced_projection_is_used(model, path):
    before, adapter = cached_logits(model), LoRA(model.layers[0].get_submodule(path))  # type: ignore[arg-type]
    model.layers[0].set_submodule(path, adapter)
    model.loss(INPUTS, TARGETS).backward()
    assert adapter.a.grad is not None and adapter.a.grad.abs().sum() > 0 and adapter.base.weight.grad is None
    adapted = cached_logits(model)
    assert not torch.allclose(adapted, before)
    adapter.base.weight.data += (adapter.b @ adapter.a).detach()
    model.layers[0].set_submodule(path, adapter.base)
    torch.testing.assert_close(cached_logits(model), adapted, rtol=1e-4, atol=1e-4)
    model.lm_head = nn.Sequential(nn.Linear(32, 29))  # type: ignore[assignment]
    assert not torch.allclose(cached_logits(model), adapted)


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


@pytest.mark.parametrize("kind", [kind for kind in sorted(KINDS) if not TRAITS[kind].per_token])
def test_running_statistics_are_updated_by_compiled_and_exported_norms(kind):
    """A graph that leaves the update out would be silently wrong."""
    x, expected = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(0)), build_norm(kind, 32)
    y, compiled = expected(x), build_norm(kind, 32)
    compiled.compile(backend="eager")
    exported = torch.export.export(build_norm(kind, 32), (torch.zeros(4, 3, 32),)).module()
    for module in (compiled, exported):
        assert torch.equal(module(x), y)
        assert all(torch.equal(module.get_buffer(name), buffer) for name, buffer in expected.named_buffers())


def test_gradients_per_example_and_a_directional_derivative():
    """vmap over grad, and forward mode, which is also used by double backward."""
    model = Llama(CONFIG)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (tokens[None],)).square().mean()

    with warnings.catch_warnings(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        warnings.simplefilter("ignore", UserWarning)  # vmap has no batching rule for some backwards, and is slower
        per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, INPUTS)
        _, slope = torch.func.jvp(lambda w: loss(w, INPUTS[0]), (weights,), (weights,))  # type: ignore[misc]
    for number, tokens in enumerate(INPUTS):
        model.zero_grad()
        model(tokens[None]).square().mean().backward()
        for name, weight in model.named_parameters():
            torch.testing.assert_close(per_example[name][number], weight.grad, rtol=1e-4, atol=1e-6)
    expected = sum((per_example[name][0] * weight).sum() for name, weight in weights.items())
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-5)


def test_make_fx_and_export_record_the_computation():
    """For any batch and length; graphs that compute on other tokens."""
    model = Llama(CONFIG)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=16)
    program = torch.export.export(model, (INPUTS,), dynamic_shapes=({0: batch, 1: length},)).module()
    traced = make_fx(lambda tokens: model(tokens))(INPUTS)
    with torch.no_grad():
        torch.testing.assert_close(traced((INPUTS + 3) % 29), model((INPUTS + 3) % 29), rtol=1e-5, atol=1e-5)
        for shape in ((2, 8), (5, 3), (3, 16)):
            tokens = torch.randint(29, shape, generator=torch.Generator().manual_seed(1))
            torch.testing.assert_close(program(tokens), model(tokens), rtol=1e-5, atol=1e-5)


def test_pickle_and_deepcopy_keep_the_tied_head(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(other) is type(model) and torch.equal(cached_logits(other), cached_logits(model))
        other.embed_tokens.weight.data.zero_()
        assert other.lm_head.weight is other.embed_tokens.weight
    assert model.embed_tokens.weight.abs().sum() > 0


@needs_fast
def test_the_accelerated_model_is_still_the_model():
    model = Llama(CONFIG).eval()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    for _ in range(2):  # a second time changes nothing
        assert accelerate(model) is None and isinstance(model, Llama) and list(model.state_dict()) == keys
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
