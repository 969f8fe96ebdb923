"""Placements against hand-written float64 formulas, on their own and in a whole model."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from config import ModelConfig
from model import Llama
from norms import build_norm
from norms.placement import PLACEMENTS, Placement, Site

CONFIG = ModelConfig(dim=16, layers=3, heads=2, hidden_dim=24, context=12, vocab_size=19)
TOKENS = torch.tensor([[1, 18, 4, 4, 9, 0]])


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x * gain / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def standardised(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * gain / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() + bias


ORACLES = {
    "pre": lambda x, norm, f: x + f(norm(x)),
    "post": lambda x, norm, f: norm(x + f(x)),
}


def site(name: str = "attention", kind: str = "rmsnorm") -> Site:
    return Site(name, 1, 3, lambda where: build_norm(kind, 16, site=where))


def test_every_placement_has_an_oracle_here():
    assert ORACLES.keys() == PLACEMENTS.keys()


@pytest.mark.parametrize("kind, oracle", [("rmsnorm", rms), ("layernorm", standardised)])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_values_and_gradients(name, kind, oracle):
    generator = torch.Generator().manual_seed(3)
    residual = PLACEMENTS[name].residual(site(kind=kind)).double()
    for parameter in residual.parameters():
        nn.init.normal_(parameter, mean=0.5, generator=generator)
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(16, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    shift = torch.randn(16, dtype=torch.float64, generator=generator)

    def sublayer(h: Tensor, more: Tensor) -> Tensor:
        return torch.tanh(h @ weight) + more

    leaves = [x, weight, *residual.parameters()]
    got = residual(x, sublayer, shift)
    expected = ORACLES[name](x, lambda h: oracle(h, *residual.parameters()), lambda h: sublayer(h, shift))
    # both are float64: 1e-16 per operation, and the eps inside the root is the same
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    along = torch.randn(got.shape, dtype=torch.float64, generator=generator)
    gradients, expected_gradients = (torch.autograd.grad((y * along).sum(), leaves) for y in (got, expected))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-10)


def vivid_logits(placement: str, **changes) -> Tensor:
    model = Llama(dataclasses.replace(CONFIG, placement=placement, init="xavier", **changes)).eval()
    with torch.no_grad():
        return model(TOKENS)


def test_placements_differ_pairwise_and_none_is_the_identity():
    logits = {name: vivid_logits(name) for name in PLACEMENTS}
    logits["no norm at all"] = vivid_logits("pre", norm="none")
    for one, other in itertools.combinations(logits, 2):
        assert (logits[one] - logits[other]).abs().max() > 1e-3, (one, other)


def test_a_residual_connection_uses_its_sublayer():
    x = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(0))
    for name, placement in PLACEMENTS.items():
        residual = placement.residual(site())
        assert not torch.allclose(residual(x, torch.sin), residual(x, torch.zeros_like)), name


def listening() -> tuple[list[str], Callable[[str], nn.Module]]:
    """A maker of norms, and the list of the sites that it is told."""
    told: list[str] = []

    def make_norm(where: str) -> nn.Module:
        told.append(where)
        return nn.Identity()

    return told, make_norm


@pytest.mark.parametrize("name, finish", [("pre", "RMSNorm"), ("post", "Identity")])
def test_where_the_final_norm_is(name, finish):
    model = Llama(dataclasses.replace(CONFIG, placement=name))
    assert type(model.finish).__name__ == finish
    told, make_norm = listening()
    PLACEMENTS[name].finish(make_norm)
    assert told == (["final"] if name == "pre" else [])


def test_norms_are_told_where_they_stand():
    told, make_norm = listening()
    for name in ("attention", "mlp"):
        for placement in PLACEMENTS.values():
            placement.residual(Site(name, 0, 3, make_norm))
    assert set(told[: len(PLACEMENTS)]) == {"attention"} and set(told[len(PLACEMENTS) :]) == {"mlp"}


def test_a_placement_with_two_streams_needs_no_change_to_the_model(monkeypatch):
    """ResiDual (arXiv 2304.14802), added on the fly: x ← N(x + f(x)), r ← r + f(x), and x + N(r) at the end."""
    sites = []

    class ResiDual(nn.Module):
        def __init__(self, where: Site):
            super().__init__()
            sites.append((where.name, where.layer, where.depth))
            self.norm = where.make_norm(where.name)

        def forward(self, streams, f, *args):
            x, r = streams
            y = f(x, *args)
            return self.norm(x + y), r + y

    class Join(nn.Module):
        def __init__(self, make_norm):
            super().__init__()
            self.norm = make_norm("final")

        def forward(self, streams):
            return streams[0] + self.norm(streams[1])

    gains = {"down": 3.0}
    placement = Placement(
        ResiDual, Join, lambda x: (x, x), init_gain=lambda role, depth: gains.get(role, 1.0) * depth, depth_scaled=False
    )
    monkeypatch.setitem(PLACEMENTS, "residual", placement)
    model = Llama(dataclasses.replace(CONFIG, placement="residual")).eval()
    assert sites == [(name, layer, 3) for layer in range(3) for name in ("attention", "mlp")]

    plain = Llama(dataclasses.replace(CONFIG, depth_scaled_init=False))
    for name, gain in (("down_proj", 9), ("up_proj", 3)):
        path = f"layers.2.mlp.{name}.weight"
        torch.testing.assert_close(model.get_parameter(path), plain.get_parameter(path) * gain)

    with torch.no_grad():
        x = r = model.embed_tokens(TOKENS)
        rope = model.rope(0, TOKENS.shape[1])
        for layer in range(3):
            y = model.get_submodule(f"layers.{layer}.self_attn")(x, rope)
            x, r = rms(x + y, torch.ones(16)), r + y
            y = model.get_submodule(f"layers.{layer}.mlp")(x)
            x, r = rms(x + y, torch.ones(16)), r + y
        expected = model.lm_head(x + rms(r, torch.ones(16)))
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
