"""What people do to a model: hooks, replaced projections, torch.func, tracing, export, pickle.

Each test runs on the plain model and on the accelerated one, which goes back to the formulas.
"""

import copy
import io
import pickle
import warnings
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

needs_kernels = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture(params=["plain", pytest.param("fast", marks=needs_kernels)])
def fast(request: pytest.FixtureRequest) -> bool:
    return request.param == "fast"


@pytest.fixture
def model(fast: bool) -> Llama:
    model = Llama(CONFIG)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    if fast:
        accelerate(model)
    return model


@pytest.fixture
def plain(model: Llama) -> Llama:
    """The same weights without kernels."""
    other = Llama(CONFIG)
    other.load_state_dict(model.state_dict())
    return other


def loss_of(model: Llama, **weights: Tensor) -> Tensor:
    return torch.func.functional_call(model, weights, (INPUTS,)).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "batchnorm"])
def test_recompute_gives_the_same_gradients(fast, dtype, norm):
    """In half precision too, where hand-written backwards used to read their saved tensors twice."""
    gradients = []
    for recompute in (False, True):
        model = Llama(ModelConfig(dim=32, layers=2, heads=2, context=8, vocab_size=29, norm=norm, dropout=0.1))
        if fast:
            accelerate(model)
        model.recompute = recompute
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model.loss(INPUTS, TARGETS)
        loss.backward()
        gradients.append([loss, *(weight.grad for weight in model.parameters()), *model.buffers()])
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_a_hook_on_a_projection_runs_and_takes_effect(model, name):
    """In training and in generation with a cache."""
    block = model.layers[1]
    parent = block.self_attn if hasattr(block.self_attn, name) else block.mlp
    calls = []

    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        calls.append(output.shape)
        return torch.zeros_like(output)

    with torch.no_grad():
        before = cached_logits(model)
    handle = getattr(parent, name).register_forward_hook(hook)
    loss = model.loss(INPUTS, TARGETS)
    loss.backward()
    assert len(calls) == 1
    with torch.no_grad():
        assert not torch.allclose(cached_logits(model), before)
    assert len(calls) == 3  # a prompt and one more token
    handle.remove()
    with torch.no_grad():
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


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
def test_a_replaced_projection_is_used(model, name):
    block = model.layers[0]
    parent = block.self_attn if hasattr(block.self_attn, name) else block.mlp
    with torch.no_grad():
        before = cached_logits(model)
    adapter = LoRA(getattr(parent, name))
    setattr(parent, name, adapter)
    model.loss(INPUTS, TARGETS).backward()
    assert adapter.a.grad is not None and adapter.a.grad.abs().sum() > 0 and adapter.base.weight.grad is None
    with torch.no_grad():
        after, adapted = cached_logits(model), copy.deepcopy(model)
        assert not torch.allclose(after, before)
        base = adapter.base
        base.weight += adapter.b @ adapter.a
        setattr(parent, name, base)
        torch.testing.assert_close(cached_logits(model), cached_logits(adapted), rtol=1e-4, atol=1e-4)


def test_a_replaced_head_is_used(model):
    with torch.no_grad():
        before = model.loss(INPUTS, TARGETS), cached_logits(model)
        model.lm_head = nn.Sequential(nn.Linear(32, 29))  # type: ignore[assignment]
        after = model.loss(INPUTS, TARGETS), cached_logits(model)
    assert all(not torch.allclose(a, b) for a, b in zip(before, after, strict=True))


def cached_logits(model: Llama) -> Tensor:
    """Logits after a prompt and one more token."""
    cache = model.new_cache()
    model.next_logits(INPUTS[:, :5], cache)
    return model.next_logits(INPUTS[:, 5:6], cache)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_torch_func_on_a_norm(kind, fast):
    norm = nn.ModuleList([build_norm(kind, 32)]).eval()
    if fast:
        accelerate(norm)
    x = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0))
    one_by_one = torch.stack([norm[0](row) for row in x])
    torch.testing.assert_close(torch.func.vmap(norm[0])(x), one_by_one, rtol=1e-6, atol=1e-6)
    leaf = x[0, 0].clone().requires_grad_()
    weights = torch.linspace(-1, 1, 32)
    (expected,) = torch.autograd.grad((norm[0](leaf) * weights).sum(), leaf)
    got = torch.func.grad(lambda row: (norm[0](row) * weights).sum())(x[0, 0])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    jacobian = torch.func.jacrev(norm[0])(x[0, 0])
    torch.testing.assert_close(weights @ jacobian, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(jacobian, torch.func.jacfwd(norm[0])(x[0, 0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in sorted(KINDS) if not TRAITS[kind].per_token])
def test_running_statistics_are_updated_rightly_or_not_at_all(kind):
    """In training. A graph that leaves the update out would be silently wrong."""
    x = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(0))
    expected = build_norm(kind, 32)
    y = expected(x)
    transforms: dict[str, Any] = {
        "vmap": torch.func.vmap,
        "grad": lambda norm: torch.func.grad(lambda x: norm(x).square().sum()),
        "jacrev": torch.func.jacrev,
        "jvp": lambda norm: lambda x: torch.func.jvp(norm, (x,), (x,)),  # type: ignore[misc]
        "make_fx": lambda norm: make_fx(norm)(torch.zeros(4, 3, 32)),
        "trace": lambda norm: torch.jit.trace(norm, torch.zeros(4, 3, 32), check_trace=False),
    }
    for name, transform in transforms.items():
        norm = build_norm(kind, 32)
        with warnings.catch_warnings(), pytest.raises(ValueError, match="call eval"):
            warnings.simplefilter("ignore")  # torch.jit is deprecated, and warns of shapes that become constants
            transform(norm)(x)
        for buffer, untouched in zip(norm.buffers(), build_norm(kind, 32).buffers(), strict=True):
            assert torch.equal(buffer, untouched), name
    compiled = build_norm(kind, 32)
    compiled.compile(backend="eager")
    exported = torch.export.export(build_norm(kind, 32), (torch.zeros(4, 3, 32),)).module()
    for module in (compiled, copy.deepcopy(build_norm(kind, 32)), exported):
        assert torch.equal(module(x), y)
        for name, buffer in expected.named_buffers():
            assert torch.equal(module.get_buffer(name), buffer), name


def test_torch_func_on_the_model(model, plain):
    """Gradients per example by vmap over grad, and jacrev of the loss."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (tokens[None],)).square().mean()

    with warnings.catch_warnings(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        warnings.simplefilter("ignore", UserWarning)  # vmap has no batching rule for some backwards, and is slower
        per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, INPUTS)
        jacobian = torch.func.jacrev(loss)(weights, INPUTS[0])
    for number, tokens in enumerate(INPUTS):
        plain.zero_grad()
        plain(tokens[None]).square().mean().backward()
        for name, weight in plain.named_parameters():
            torch.testing.assert_close(per_example[name][number], weight.grad, rtol=1e-4, atol=1e-6)
            if number == 0:
                torch.testing.assert_close(jacobian[name], weight.grad, rtol=1e-4, atol=1e-6)


def test_make_fx_records_the_computation(model, plain):
    """A graph that computes: it used to record nothing but empty tensors."""
    graph = make_fx(lambda tokens: model(tokens))(INPUTS)
    assert sum("aten.mm" in str(node.target) or "aten.addmm" in str(node.target) for node in graph.graph.nodes) >= 14
    with torch.no_grad():
        other = (INPUTS + 3) % 29
        torch.testing.assert_close(graph(other), plain(other), rtol=1e-5, atol=1e-5)


def test_jit_trace(model, plain):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and warns of shapes that become constants
        traced = torch.jit.trace(model, (INPUTS,), check_trace=False)
    with torch.no_grad():
        torch.testing.assert_close(traced((INPUTS + 3) % 29), plain((INPUTS + 3) % 29), rtol=1e-5, atol=1e-5)


def test_export_with_dynamic_batch_and_length(model, plain):
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=16)
    program = torch.export.export(model, (INPUTS,), dynamic_shapes=({0: batch, 1: length},))
    with torch.no_grad():
        for shape in ((2, 8), (5, 3), (3, 16)):
            tokens = torch.randint(29, shape, generator=torch.Generator().manual_seed(1))
            torch.testing.assert_close(program.module()(tokens), plain(tokens), rtol=1e-5, atol=1e-5)


def test_pickle_and_deepcopy(model, plain):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(other) is type(model)
        with torch.no_grad():
            torch.testing.assert_close(other(INPUTS), plain(INPUTS), rtol=1e-5, atol=1e-5)
            other.embed_tokens.weight.zero_()
            assert other.lm_head.weight is other.embed_tokens.weight
    assert model.embed_tokens.weight.abs().sum() > 0


def test_double_backward_and_forward_mode(model, plain):
    """A Hessian-vector product by reverse over reverse, and a directional derivative by forward mode."""
    direction = torch.randn(29, 32, generator=torch.Generator().manual_seed(0))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        products = []
        for each in (model, plain):
            weight = each.embed_tokens.weight
            (gradient,) = torch.autograd.grad(each(INPUTS).square().mean(), weight, create_graph=True)
            (product,) = torch.autograd.grad((gradient * direction).sum(), weight)
            weights = {"embed_tokens.weight": weight.detach()}  # and of the tied head
            tangents = dict.fromkeys(weights, direction)
            _, slope = torch.func.jvp(  # type: ignore[misc]
                lambda weights, each=each: loss_of(each, **weights), (weights,), (tangents,)
            )
            torch.testing.assert_close(slope, (gradient * direction).sum().detach(), rtol=1e-4, atol=1e-5)
            products.append(product)
    torch.testing.assert_close(*products, rtol=1e-3, atol=1e-5)


def test_the_accelerated_model_is_still_the_model():
    if unavailable() is not None:
        pytest.skip(str(unavailable()))
    model = Llama(CONFIG)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    assert accelerate(model) is model
    assert isinstance(model, Llama) and type(model) is not Llama
    assert list(model.state_dict()) == keys
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    accelerate(model)  # a second time changes nothing
    assert list(model.state_dict()) == keys
