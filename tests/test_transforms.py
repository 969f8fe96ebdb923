"""What people do to a model: hooks, replaced projections, torch.func, tracing, export, pickle.

Each test runs on the plain model and on the accelerated one, which goes back to the formulas.
"""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from config import ModelConfig
from model import Linear, Llama
from norms import KINDS, TRAITS, build_norm
from runtime.acceleration import accelerate, unavailable

CONFIG = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48, context=16, vocab_size=29)
TOKENS = torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
needs_kernels = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture(params=["plain", pytest.param("fast", marks=needs_kernels)])
def model(request: pytest.FixtureRequest) -> Llama:
    model = Llama(CONFIG).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    if request.param == "fast":
        accelerate(model)
        assert type(model) is not Llama
        accelerate(model)  # a second time changes nothing
    return model


@pytest.fixture
def plain(model: Llama) -> Llama:
    """The same weights without kernels. Loading is strict: an accelerated model has the same keys."""
    other = Llama(CONFIG).eval()
    other.load_state_dict(model.state_dict())
    return other


def parent(model: Llama, name: str) -> nn.Module:
    block = model.layers[1]
    return block.self_attn if hasattr(block.self_attn, name) else block.mlp  # type: ignore[return-value]


@torch.inference_mode()
def cached_logits(model: Llama) -> Tensor:
    """Logits after a prompt and one more token."""
    cache = model.new_cache()
    model.next_logits(INPUTS[:, :5], cache)
    return model.next_logits(INPUTS[:, 5:6], cache)


@pytest.mark.parametrize("name", [*PROJECTIONS, "dropout"])
def test_a_hook_runs_and_takes_effect(model, name):
    """In training and in generation with a cache."""
    calls, before = [], cached_logits(model)

    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        calls.append(output.shape)
        return torch.zeros_like(output)

    with getattr(parent(model, name), name).register_forward_hook(hook):
        model.loss(INPUTS, TARGETS).backward()
        assert len(calls) == 1
        assert not torch.allclose(cached_logits(model), before)
        assert len(calls) == 3  # a prompt and one more token
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


@pytest.mark.parametrize("name", PROJECTIONS[::2])
def test_a_replaced_projection_is_used(model, name):
    base, before = getattr(parent(model, name), name), cached_logits(model)
    adapter = LoRA(base)
    setattr(parent(model, name), name, adapter)
    model.loss(INPUTS, TARGETS).backward()
    assert adapter.a.grad is not None and adapter.a.grad.abs().sum() > 0 and adapter.base.weight.grad is None
    adapted = cached_logits(model)
    assert not torch.allclose(adapted, before)
    base.weight.data += (adapter.b @ adapter.a).detach()
    setattr(parent(model, name), name, base)
    torch.testing.assert_close(cached_logits(model), adapted, rtol=1e-4, atol=1e-4)


def test_a_replaced_head_is_used(model):
    before = model.loss(INPUTS, TARGETS).detach(), cached_logits(model)
    model.lm_head = nn.Sequential(nn.Linear(32, 29))
    after = model.loss(INPUTS, TARGETS).detach(), cached_logits(model)
    assert all(not torch.allclose(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_torch_func_on_a_norm(kind):
    norm = build_norm(kind, 32).eval()
    x, weights = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 32)
    one_by_one = torch.stack([norm(row) for row in x])
    torch.testing.assert_close(torch.func.vmap(norm)(x), one_by_one, rtol=1e-6, atol=1e-6)
    leaf = x[0, 0].clone().requires_grad_()
    (expected,) = torch.autograd.grad((norm(leaf) * weights).sum(), leaf)
    jacobian = torch.func.jacrev(norm)(x[0, 0])
    torch.testing.assert_close(weights @ jacobian, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(jacobian, torch.func.jacfwd(norm)(x[0, 0]), rtol=1e-5, atol=1e-6)


TRANSFORMS: dict[str, Any] = {
    "vmap": torch.func.vmap,
    "grad": lambda norm: torch.func.grad(lambda x: norm(x).square().sum()),
    "jvp": lambda norm: lambda x: torch.func.jvp(norm, (x,), (x,)),  # type: ignore[misc]
    "make_fx": lambda norm: make_fx(norm)(torch.zeros(4, 3, 32)),
    "trace": lambda norm: torch.jit.trace(norm, torch.zeros(4, 3, 32), check_trace=False),
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and warns of shapes that become constants
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", [kind for kind in sorted(KINDS) if not TRAITS[kind].per_token])
def test_running_statistics_are_not_lost_in_a_transform(kind, transform):
    """In training. A graph that leaves the update out would be silently wrong."""
    norm = build_norm(kind, 32)
    with pytest.raises(ValueError, match="call eval"):
        TRANSFORMS[transform](norm)(torch.ones(4, 3, 32))
    assert all(map(torch.equal, norm.buffers(), build_norm(kind, 32).buffers()))


@pytest.mark.filterwarnings("ignore")  # vmap has no batching rule for some backwards, and is slower
def test_gradients_per_example_and_second_derivatives(model, plain):
    """vmap over grad, and a Hessian-vector product: reverse over reverse and forward over reverse."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    direction = {name: torch.ones_like(weight) for name, weight in weights.items()}

    def loss(weights: dict[str, Tensor], tokens: Tensor, model: Llama = model) -> Tensor:
        return torch.func.functional_call(model, weights, (tokens[None],)).square().mean()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, INPUTS)
        _, slope = torch.func.jvp(lambda weights: loss(weights, INPUTS[0]), (weights,), (direction,))  # type: ignore[misc]
        plain(INPUTS[:1]).square().mean().backward()
        gradients = {name: weight.grad for name, weight in plain.named_parameters()}
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name][0], gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(slope, sum(gradient.sum() for gradient in gradients.values()), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and warns of shapes that become constants
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_recorded_graphs_compute_what_the_model_does(model, plain, mode):
    """make_fx, jit.trace and export with dynamic shapes. In inference mode, kernels would be missing in the graph."""
    other = (INPUTS + 3) % 29

    def step(tokens: Tensor) -> Tensor:
        cache = model.new_cache()
        model.next_logits(tokens[:, :5], cache)
        return model.next_logits(tokens[:, 5:6], cache)

    with mode():
        torch.testing.assert_close(make_fx(step)(other)(INPUTS), cached_logits(plain), rtol=1e-5, atol=1e-5)
        traced = torch.jit.trace(model, (other,), check_trace=False)
        torch.testing.assert_close(traced(INPUTS), plain(INPUTS), rtol=1e-5, atol=1e-5)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=16)
    program = torch.export.export(model, (INPUTS,), dynamic_shapes=({0: batch, 1: length},)).module()
    torch.testing.assert_close(program(other[:1, :3]), plain(other[:1, :3]), rtol=1e-5, atol=1e-5)


def test_pickle_and_deepcopy(model, plain):
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(other) is type(model) and torch.equal(cached_logits(other), cached_logits(model))
        other.embed_tokens.weight.data.mul_(2)  # nothing about weights is cached
        assert other.lm_head.weight is other.embed_tokens.weight
        assert not torch.allclose(cached_logits(other), cached_logits(model))
    torch.testing.assert_close(cached_logits(model), cached_logits(plain), rtol=1e-5, atol=1e-5)
