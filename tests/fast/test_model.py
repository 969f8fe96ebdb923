"""A whole accelerated model against the plain one."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fast.decode
import fast.training
from config import ModelConfig
from fast import FAST, accelerate
from model import Linear, Llama
from norms import KINDS, TRAITS
from norms.placement import PLACEMENTS

TOKENS = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(0))
TARGETS = TOKENS.roll(-1, 1)


def models(**settings: Any) -> tuple[Any, Any]:
    """Plain and accelerated, with random gains, and every matrix large enough for all parts to matter."""
    small = {"dim": 24, "layers": 2, "heads": 4, "hidden_dim": 40, "vocab_size": 61, "context": 17}
    plain = Llama(ModelConfig(**small | settings))
    for seed, (name, parameter) in enumerate(plain.named_parameters()):
        draw = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        gain = 0.2 if "rotated_q_norm" in name else 1  # about where it starts: more, and softmax amplifies roundings
        parameter.data.copy_(0.15 * draw if parameter.dim() == 2 else gain * (1 + 0.2 * draw))
    return plain, accelerate(copy.deepcopy(plain))


def loss_and_gradients(model: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        loss = model.loss(TOKENS, TARGETS)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


def assert_near(ours: list[Tensor], plain: list[Tensor], tolerance: float) -> None:
    assert abs(ours[0] - plain[0]) <= tolerance * plain[0]
    for a, b in zip(ours[1:], plain[1:], strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-7


def without_norm(placement: str) -> bool:
    return PLACEMENTS[placement].without_norm


SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 9.0}
VARIANTS: list[dict[str, Any]] = [
    *({"placement": placement, "layers": 4} for placement in PLACEMENTS),
    *({"placement": placement, "norm": "layernorm", "layers": 2} for placement in ("siamese", "sandwich")),
    *({"norm": kind} for kind in sorted(KINDS)),
    {"kv_heads": 2},
    {"kv_heads": 1, "qk_norm": "head", "norm": "layernorm"},
    {"qk_norm": "full"},
    {"tie_embeddings": False},
    {"norm_args": {"cast_order": "llama"}},
    {"norm_args": {"zero_centered": True}, "embedding_scale": 4.9},
    {"head_dim": 10, "kv_heads": 2, "qk_norm": "head"},
    {"heads": 5, "head_dim": 8, "rope_scaling": SCALING},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_loss_and_gradients_in_fp32(settings):
    """fp32 rounds to 2^-24; a few hundred roundings, some amplified, stay within 2e-5."""
    plain, ours = models(**settings)
    assert_near(loss_and_gradients(ours), loss_and_gradients(plain), 2e-5)


@pytest.mark.parametrize("settings", [{}, {"kv_heads": 2, "norm": "layernorm"}, {"qk_norm": "head"}], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradients_in_bf16(settings, recompute):
    """Within twice the error of the plain model, which keeps the scores of attention in fp32 for the gradient."""
    plain, ours = models(**settings)
    exact = loss_and_gradients(copy.deepcopy(plain).double())
    plain.recompute = ours.recompute = recompute
    there, here = (loss_and_gradients(model, torch.bfloat16) for model in (plain, ours))
    for a, b, c in zip(here, there, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm() + 1e-3 * c.norm()


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm", "batchnorm"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_recompute_changes_no_bit(kind, dtype):
    _, ours = models(norm=kind)
    kept = copy.deepcopy(ours)
    ours.recompute = True
    assert all(map(torch.equal, loss_and_gradients(ours, dtype), loss_and_gradients(kept, dtype)))
    assert all(map(torch.equal, ours.buffers(), kept.buffers()))


def test_there_is_no_dropout_in_evaluation():
    plain, ours = (model.eval() for model in models(dropout=0.3))
    assert_near(loss_and_gradients(ours), loss_and_gradients(plain), 2e-5)


@pytest.mark.parametrize("dtype, tolerance", [(None, 2e-5), (torch.bfloat16, 0.03)], ids=str)
def test_dropout_is_that_of_the_plain_model(dtype, tolerance):
    """Of the embedding, attention and the MLP. In bf16, a few units of 2^-7: where dropout is missing, all changes."""
    plain, ours = models(dropout=0.3, kv_heads=2)
    found = []
    for model in (plain, ours):
        torch.manual_seed(0)
        found.append(loss_and_gradients(model, dtype))
    assert_near(found[0], found[1], tolerance)


def test_targets_that_are_no_token_ids_are_the_formulas():
    plain, ours = models()
    targets = TARGETS.clone()
    targets[:, ::2] = -100  # ignored
    torch.testing.assert_close(ours.loss(TOKENS, targets), plain.loss(TOKENS, targets))
    for bad in (61, -1, 2**40):
        targets = TARGETS.clone()
        targets[0, 0] = bad
        with pytest.raises(IndexError):
            ours.loss(TOKENS, targets)
    with pytest.raises(ValueError):
        ours.loss(TOKENS, TARGETS[:, 1:])


# --- generation ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def cached_logits(model: Any, prompt: int = 4, rows: int = 3) -> Tensor:
    """Logits after each token from the prompt's last one on, token by token."""
    tokens, cache = TOKENS[:1].expand(rows, -1) if rows > 3 else TOKENS[:rows], model.new_cache()
    steps = [tokens[:, :prompt], *tokens[:, prompt:].split(1, 1)]
    return torch.stack([model.next_logits(step, cache) for step in steps], 1)


@pytest.fixture
def kernel_calls(monkeypatch) -> list[str]:
    names: list[str] = []
    real = fast.decode.kernels

    def noticed() -> Any:
        names.append("called")
        return real()

    monkeypatch.setattr(fast.decode, "kernels", noticed)
    return names


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_generation_continues_the_uncached_forward(settings, rows, kernel_calls):
    plain, ours = models(**settings)
    plain.eval(), ours.eval()
    with torch.inference_mode():
        expected = plain(TOKENS[:rows])[:, 3:]
    found = cached_logits(ours, rows=rows)
    parts = 0 if settings.get("placement") == "ngpt" else 3  # nGPT's scales are the formula's
    assert len(kernel_calls) >= 13 * parts * len(ours.layers)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()  # as above


@pytest.mark.parametrize("rows", [32, 33])
def test_many_samples(rows):
    _, ours = models()
    few, many = cached_logits(ours.eval(), rows=1), cached_logits(ours, rows=rows)
    torch.testing.assert_close(many, few.expand_as(many), rtol=1e-5, atol=1e-5)


def test_generation_with_weights_in_bf16():
    """Weights are rounded, activations are not: as exact as fp32 on the same weights, but for the prompt."""
    plain, ours = models(tie_embeddings=False)
    for model in (plain, ours):
        for module in model.eval().modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.bfloat16()
    for module in plain.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.float()
    with torch.inference_mode():
        expected = plain(TOKENS)[:, 3:]
    with torch.autocast("cpu", torch.bfloat16):
        found = cached_logits(ours)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


# --- what happens to the modules -------------------------------------------------------------------------------------


def test_modules_stay_what_they_were():
    plain, ours = models(norm="layernorm")
    assert list(ours.state_dict()) == list(plain.state_dict())
    fast_ones = [module for module in ours.modules() if isinstance(module, FAST)]
    assert len(fast_ones) == 1 + 2 * 4 + 1
    assert [type(a).__mro__[1] if isinstance(a, FAST) else type(a) for a in ours.modules()] == list(
        map(type, plain.modules())
    )
    assert accelerate(ours) is ours and sum(isinstance(module, FAST) for module in ours.modules()) == len(fast_ones)
    expected = cached_logits(ours.eval())
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(cached_logits(other), expected)
    for parameter in ours.parameters():
        parameter.data.mul_(1.1)  # nothing about weights is cached
    changed = cached_logits(ours)
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(changed, cached_logits(plain.eval()), rtol=1e-5, atol=1e-5)
    ours.load_state_dict({name: tensor.clone() for name, tensor in ours.state_dict().items()}, assign=True)
    assert torch.equal(cached_logits(ours), changed)


def test_a_subclass_is_left_alone():
    class Mine(Llama):
        pass

    assert type(accelerate(Mine(ModelConfig(dim=8, heads=2, vocab_size=9, layers=1)))) is Mine


def replaced(model: Any, path: str) -> None:
    """Put a linear module that doubles in place of the one at `path`."""

    class Doubled(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    old = model.get_submodule(path)
    new = Doubled(old.in_features, old.out_features)
    new.weight = old.weight
    model.set_submodule(path, new)


PATHS = [
    *(f"layers.1.self_attn.{name}_proj" for name in "qkvo"),
    *(f"layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    "lm_head",
]


@pytest.mark.parametrize("path", PATHS)
def test_hooks_fire_and_replacements_take_effect(path):
    plain, ours = models()
    fired: list[str] = []
    handle = ours.get_submodule(path).register_forward_hook(lambda *args: fired.append(path))
    loss_and_gradients(ours)
    assert fired
    fired.clear()
    cached_logits(ours.eval())
    assert len(fired) == 14
    handle.remove()
    for model in (plain, ours):
        replaced(model.train(), path)
    assert_near(loss_and_gradients(ours), loss_and_gradients(plain), 2e-5)
    torch.testing.assert_close(cached_logits(ours.eval()), cached_logits(plain.eval()), rtol=1e-4, atol=1e-5)


def test_hooks_for_all_modules_see_every_module():
    """As profilers and summaries of models register them. A plain model and ours call the same modules."""
    called: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *args: called.append(module))
    seen = []
    try:
        for model in models(layers=1):
            names = {module: name for name, module in model.named_modules()}
            for function in (loss_and_gradients, cached_logits):
                called.clear()
                function(model.train(function is loss_and_gradients))
                seen.append([names[module] for module in called])
    finally:
        handle.remove()
    in_loss, cached, *ours = seen
    assert ours == [in_loss, cached] and {"lm_head", "layers.0.mlp.down_proj"} <= set(in_loss) & set(cached)


def test_float64_and_meta_are_the_formulas():
    plain, ours = models()
    expected = loss_and_gradients(copy.deepcopy(plain).double())
    assert all(map(torch.equal, loss_and_gradients(copy.deepcopy(ours).double()), expected))
    with torch.device("meta"):
        assert ours.to("meta")(TOKENS.to("meta")).shape == (3, 17, 61)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_recorders_see_the_formula():
    plain, ours = models()
    plain.eval(), ours.eval()
    expected = plain(TOKENS).detach()
    with torch.no_grad():
        traced = torch.jit.trace(ours, TOKENS.flip(0), check_trace=False)
        compiled = torch.compile(ours, backend="aot_eager")
        batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", min=2, max=16)
        exported = torch.export.export(ours, (TOKENS[:2, :9],), dynamic_shapes=({0: batch, 1: length},)).module()
        for function in (traced, compiled):
            torch.testing.assert_close(function(TOKENS), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(exported(TOKENS[:, :16]), expected[:, :16], rtol=1e-5, atol=1e-5)
    compiled_loss = torch.compile(ours.loss, backend="aot_eager")
    torch.testing.assert_close(compiled_loss(TOKENS, TARGETS), plain.loss(TOKENS, TARGETS))
    values = dict(ours.named_parameters())
    weight = values.pop("embed_tokens.weight").detach()

    def loss(model: Any) -> Any:
        def of(weight: Tensor) -> Tensor:
            state = {"embed_tokens.weight": weight, "lm_head.weight": weight}
            return torch.func.functional_call(model, state, (TOKENS,)).square().mean()

        return of

    found, wanted = (torch.func.grad(loss(model))(weight) for model in (ours, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_every_kind_of_norm_is_among_the_variants():
    assert {settings.get("norm") for settings in VARIANTS} >= {kind for kind in KINDS if not TRAITS[kind].identity}
