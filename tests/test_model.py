"""The parts of the model: attention, rotary positions, KV cache, initial weights, dropout.

What all of it computes is compared in test_minimal.py and norms/test_placement.py, with float64 formulas, and in
test_parity.py.
"""

import copy
import dataclasses
from itertools import chain
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from config import ModelConfig
from machine.device import deterministic
from model import Embedding, Linear, Llama, Rope, precompute_freqs_cis, rotate
from norms import KINDS
from norms.placement import PLACEMENTS, Placement, PreNorm, Site
from norms.rmsnorm import RMSNorm
from roles import draw_weights, matrices
from tests.random_values import drawn, normal, randomize

SMALL = ModelConfig(dim=24, layers=2, heads=4, kv_heads=2, hidden_dim=40, context=16, vocab_size=29)
TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8]])


def test_a_norm_that_is_not_per_head_leaves_queries_and_keys_to_rmsnorm():
    """Whose arguments are its own."""
    attention: Any = Llama(norm="groupnorm", norm_args={"groups": 4, "eps": 0.5}, qk_norm="head").layers[0].self_attn
    for norm in (attention.q_norm, attention.k_norm):
        assert type(norm) is RMSNorm and norm.eps == RMSNorm(4).eps


@pytest.mark.parametrize("most", [1 << 16, 10])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_loss_of_a_model_in_bf16_is_that_of_its_logits_in_fp32(cap, most, monkeypatch):
    """In bf16 it would have 3 digits, also where the vocabulary is a large one. A cap makes fp32 of the logits."""
    monkeypatch.setattr("model.LARGE_VOCABULARY", most)
    model = randomize(Llama(dataclasses.replace(SMALL, logit_cap=cap)), matrices=1.5).bfloat16()
    with torch.no_grad():
        h = model.hidden(TOKENS[:, :-1])
        loss, logits, z = model.loss(TOKENS[:, :-1], TOKENS[:, 1:]), model.logits(h), model.lm_head(h).double()
    assert logits.dtype == (torch.float32 if cap else torch.bfloat16)
    expected = nn.functional.cross_entropy((cap * (z / cap).tanh() if cap else z).mT, TOKENS[:, 1:])
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("backend", ["", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_the_loss_of_a_large_vocabulary_needs_logits_of_a_few_tokens_at_a_time(backend, monkeypatch):
    """It is the loss of all logits in float64, and so are its gradients, also compiled. Training adds the z-loss."""
    model = Llama(dataclasses.replace(SMALL, z_loss=0.1, logit_cap=0.05)).double()
    tokens, targets = torch.randint(model.config.vocab_size, (2, 2, 7))
    targets.view(-1)[[0, 1, 3, 8, 9, 10, 11, 13]] = -100  # in the parts, 3, 0, 4 and 1 do not count
    logits = model(tokens).flatten(0, 1)
    cross_entropy = nn.functional.cross_entropy(logits, targets.flatten())
    expected = cross_entropy + 0.1 * logits.logsumexp(-1).square()[targets.flatten() >= 0].mean()
    torch.testing.assert_close(model.loss(tokens, targets), cross_entropy, rtol=1e-14, atol=0)
    torch.testing.assert_close(sum(model.objective(tokens, targets).values()), expected, rtol=1e-14, atol=0)
    monkeypatch.setattr("model.LARGE_VOCABULARY", 10)
    monkeypatch.setattr("model.LOSS_TOKENS", 4)
    objective = torch.compile(model.objective, backend=backend) if backend else model.objective
    loss = torch.stack([*objective(tokens, targets).values()]).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    weights = list(model.parameters())
    for found, gradient in zip(*(torch.autograd.grad(each, weights) for each in (loss, expected)), strict=True):
        assert (found - gradient).norm() <= 1e-14 * gradient.norm()
    counted = Mock(side_effect=model.logits)
    monkeypatch.setattr(model, "logits", counted)
    model.loss(tokens, targets)
    assert [len(call.args[0]) for call in counted.call_args_list] == [4, 4, 4, 2]


def test_which_attention_is_called(monkeypatch):
    """Heads have keys and values of their own, as fused kernels need, but those of one token are rows of a product.

    Only several tokens after cached ones have a mask.
    """
    attention = Mock(wraps=nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    model = randomize(Llama(dataclasses.replace(SMALL, layers=1, dropout=0.25)), matrices=1.5)
    cache = model.new_cache()
    model.train()(TOKENS)
    model.eval()
    for part in TOKENS.split([5, 2, 1], dim=1):
        model(part, cache)
    calls = [
        (q.shape[2], *k.shape[1:3], options["attn_mask"] is not None, options["is_causal"], options["dropout_p"])
        for (q, k, _), options in attention.call_args_list
    ]
    whole = (8, 4, 8, False, True, 0.25)
    assert calls == [whole, (5, 4, 5, False, True, 0), (2, 4, 7, True, False, 0), (2, 2, 8, False, False, 0)]


def test_precompute_freqs_cis():
    """fp32 rounds to 6e-8; an angle formed in fp32 would be off by up to 0.008 at the last position."""
    table = precompute_freqs_cis(dim=6, end=200_000, theta=50.0)
    angles = torch.arange(200_000).double()[:, None] * 50.0 ** (-torch.tensor([0.0, 2.0, 4.0]).double() / 6)
    for found, expected in zip(table, (angles.cos(), angles.sin()), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-7)


def test_rope_table_survives_meta_device_and_casts():
    cos, sin = precompute_freqs_cis(6, 16, 10000.0)
    with torch.device("meta"):
        model = Llama(SMALL)
    model.to_empty(device="cpu")
    for module in (model, Llama(SMALL).bfloat16(), Llama(SMALL).half().float(), Rope(SMALL).double()):
        rope = module.rope if isinstance(module, Llama) else module
        assert torch.equal(rope.cos, cos) and torch.equal(rope.sin, sin)
    x = normal(1, 16, 1, 6, dtype=torch.bfloat16)
    assert torch.equal(rotate(x, (cos, sin)), rotate(x.float(), (cos, sin)).bfloat16()), "it is rotated in fp32"


def test_a_tied_head_stays_the_embedding():
    """Where torch replaces parameters: by assignment, from another module as well, `to_empty`, `to` and copies."""
    state = Llama(SMALL, seed=1).state_dict()
    with torch.device("meta"):
        assigned, emptied = Llama(SMALL), Llama(SMALL)
    nn.ModuleList([assigned]).load_state_dict({f"0.{name}": tensor for name, tensor in state.items()}, assign=True)
    assert emptied.to_empty(device="cpu").lm_head.weight is emptied.embed_tokens.weight
    emptied.load_state_dict(state)
    for model in (assigned, emptied, copy.deepcopy(assigned).double()):
        assert model.lm_head.weight is model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight.float(), state["lm_head.weight"])
    diverged = {name: torch.full_like(weight, torch.nan) for name, weight in state.items()}
    assert Llama(SMALL).load_state_dict(diverged)
    apart = copy.deepcopy(assigned)
    apart.lm_head.weight = nn.Parameter(apart.lm_head.weight + 1)
    assert apart.double().lm_head.weight is not apart.embed_tokens.weight, "a cast does not drop a trained head"
    message = r"lm_head\.weight is not embed_tokens\.weight; load it into a Llama\(tie_embeddings=False\)"
    with pytest.raises(RuntimeError, match=message):
        Llama(SMALL).load_state_dict(apart.state_dict())


def test_exceeding_the_context_and_two_configurations_are_refused():
    with pytest.raises(ValueError, match="Llama takes a ModelConfig or its fields, not both"):
        Llama(SMALL, dim=64)
    model, tokens = Llama(SMALL), torch.zeros(1, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must have the shape \(B, T\)"):
        model(tokens[0])
    with pytest.raises(ValueError, match="17 tokens exceed the model's context of 16"):
        model(tokens)
    cache = model.new_cache()
    with torch.no_grad():
        model(tokens[:, :16], cache)
    with pytest.raises(ValueError, match="17 tokens"):
        model(tokens[:, :1], cache)


def test_initial_weight_depends_on_seed_name_and_shape():
    """Not on the norm, the depth, the default dtype or the random state. It stays. norms/test_placement.py has all."""
    torch.manual_seed(123)
    state = torch.get_rng_state()
    model, ours = Llama(SMALL, seed=7), "layers.1.mlp.up_proj.weight"
    assert torch.equal(state, torch.get_rng_state())
    weight = model.get_parameter(ours)
    assert torch.equal(weight, drawn(7, f"model.{ours}", weight.shape) * 0.02)
    torch.manual_seed(99)
    torch.set_default_dtype(torch.float64)
    other = Llama(dataclasses.replace(SMALL, layers=5, norm="layernorm", qk_norm="full"), seed=7)
    torch.set_default_dtype(torch.float32)
    assert torch.equal(weight, other.get_parameter(ours).float())
    named = {f"model.{name}" for name, weight in model.named_parameters() if weight.ndim == 2}
    assert {name for _, name, _ in matrices(model)} == named


def test_nothing_is_uninitialized_when_a_constructor_returns():
    """Memory that nobody has written is NaN here."""
    variants: list[dict[str, Any]] = [{"norm": kind, "attention_bias": True} for kind in KINDS]
    variants += [{"placement": name, "scaled_embedding": True} for name in PLACEMENTS]
    with deterministic(True):
        assert torch.empty(3).isnan().all()
        made: list[nn.Module] = [Linear(3, 5, "gate"), Embedding(SMALL)]
        made += [Llama(dataclasses.replace(SMALL, tie_embeddings=False, **variant)) for variant in variants]
    for module in made:
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            assert tensor.isfinite().all(), f"{name} of {module}"


def test_a_matrix_without_a_role_is_an_error(monkeypatch):
    """Whatever it is called, unless a residual connection or a norm owns it, which initialize themselves."""

    class WithMatrix(PreNorm):
        def __init__(self, site: Site):
            super().__init__(site)
            self.mix = nn.Linear(site.dim, site.dim)

    monkeypatch.setitem(PLACEMENTS, "with_matrix", Placement(WithMatrix))
    assert Llama(dataclasses.replace(SMALL, placement="with_matrix"))
    plain = {"linear": nn.Linear(24, 3), "embedding": nn.Embedding(24, 3), "v_norm": nn.Parameter(torch.zeros(3, 3))}
    for name, matrix in plain.items():
        setattr((model := Llama(SMALL)).get_submodule("layers.0.mlp"), name, matrix)
        with pytest.raises(ValueError, match=rf"^layers\.0\.mlp\.{name}(\.weight)? is a matrix without a role"):
            draw_weights(model, 0)
    with pytest.raises(ValueError, match=r"role 'extra_gate' is not known: add it to ROLES in roles\.py"):
        Linear(3, 5, "extra_gate")


def test_dropout_of_the_embedding():
    """Without norms, and with blocks that add nothing, the hidden states are the embedding after dropout."""
    model = randomize(Llama(dataclasses.replace(SMALL, norm="none", dropout=0.25)), matrices=1.5)
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.data.zero_()
    whole, dropped = model.hidden(TOKENS), model.train().hidden(TOKENS)
    kept = dropped != 0
    assert 0.65 < kept.float().mean() < 0.85  # 384 values; the standard deviation is 0.022
    torch.testing.assert_close(dropped[kept], 4 / 3 * whole[kept])


@pytest.mark.parametrize("dtype, cap", [(torch.float32, 0), (torch.bfloat16, 0), (torch.float32, 5)], ids=str)
def test_dropout_applies_to_attention_and_mlp(dtype, cap):
    """Of attention, both its output and its probabilities, which change the values that are not dropped."""
    model = randomize(Llama(dataclasses.replace(SMALL, dropout=0.25, attention_cap=cap)), matrices=1.5).train()
    x = normal(2, 8, 24)
    block, rope = model.get_submodule("layers.0"), model.rope(slice(8))
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        cases: list[tuple[Any, tuple, bool]] = [(block.self_attn, (x, rope), True), (block.mlp, (x,), False)]
        for sublayer, arguments, probabilities in cases:
            first, second = (sublayer(*arguments) for _ in range(2))
            assert 0.15 < (first == 0).float().mean() < 0.35  # as above
            kept = (first != 0) & (second != 0)
            assert torch.allclose(first[kept], second[kept]) != probabilities


def test_gradient_checkpointing_computes_each_block_twice_and_is_bit_identical():
    """Loss and gradients of two batches with dropout."""
    tokens, calls = torch.arange(4 * 18).view(2, 4, 9) % 11, []

    def two_batches(recompute: bool) -> list[torch.Tensor]:
        model = Llama(dim=16, layers=3, heads=2, context=8, vocab_size=11, dropout=0.2)
        model.recompute = recompute
        for number, block in enumerate(model.layers):
            block.register_forward_pre_hook(lambda *args: calls.append("gather"))  # as sharding does
            block.get_submodule("mlp").register_forward_pre_hook(lambda *args, number=number: calls.append(number))
        torch.manual_seed(0)
        losses = [model.loss(batch[:, :-1], batch[:, 1:]) for batch in tokens]
        torch.stack(losses).sum().backward()
        return [*losses, *(weight.grad for weight in model.parameters() if weight.grad is not None)]

    assert all(map(torch.equal, two_batches(False), two_batches(True)))
    assert calls == ["gather", 0, "gather", 1, "gather", 2] * 4 + [2, 1, 0] * 2
