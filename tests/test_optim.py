"""Muon against its formula, and the optimizer and weight decay of each parameter."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.optim import AdamW

from config import TrainConfig
from model import Llama
from optim import Muon, make_optimizers


def take_random_steps(optimizer, weights):
    """Take four steps on random gradients and return the gradients: one list per step."""
    generator, history = torch.Generator().manual_seed(0), []
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        history.append([weight.grad.clone() for weight in weights])
        optimizer.step()
    return history


def muon_by_svd(weight, gradients, lr, decay, momentum):
    """Muon in float64 by SVD: Newton-Schulz is an odd polynomial, so it acts on each singular value separately."""
    mean = torch.zeros_like(weight)
    for gradient in gradients:
        mean = momentum * mean + (1 - momentum) * gradient
        u, s, vt = torch.linalg.svd(momentum * mean + (1 - momentum) * gradient, full_matrices=False)
        s = s / s.square().sum().sqrt()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        weight = weight - lr * decay * weight - lr * 0.2 * max(weight.shape) ** 0.5 * (u * s) @ vt
    return weight


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
def test_muon_matches_the_svd_formula(lr, dtype, tolerance, monkeypatch):
    """Newton-Schulz rounds 15 products, in bf16 by 2⁻⁹ each (measured: 0.010 to 0.012). The rate is the schedule's."""
    monkeypatch.setattr("optim.BATCH", 2)
    monkeypatch.setattr("optim.ELEMENTS", 0)
    shapes = [(24, 24), (24, 40), (40, 24), (24, 24), (40, 24), (8, 24), (24, 24)]  # one is of a second batch
    starts = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    weights = [torch.nn.Parameter(start.clone()) for start in starts]
    unused = torch.nn.Parameter(torch.ones(24, 24))
    muon = Muon([{"params": [*weights, unused], "weight_decay": 0.02}], 0.5, momentum=0.85, dtype=dtype)
    muon.param_groups[0]["lr"] = lr
    gradients = take_random_steps(muon, weights)
    for number, start in enumerate(starts):
        steps = [step[number].double() for step in gradients]
        expected = muon_by_svd(start.double(), steps, lr=0.05, decay=0.02, momentum=0.85)
        update_norm = (expected - start).norm()
        assert (weights[number] - expected).norm() < tolerance * update_norm, tuple(start.shape)
    assert torch.equal(unused, torch.ones(24, 24)), "it has no gradient"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_muon_multiplies_in_bfloat16_only_in_such_a_run(dtype, monkeypatch):
    """In float16 small singular values would be lost, so such a run has them in float32."""
    product, model = Mock(wraps=torch.baddbmm), Llama(dim=8, layers=1)
    monkeypatch.setattr(torch, "baddbmm", product)
    muon, _ = make_optimizers(model, TrainConfig(dtype=dtype))
    take_random_steps(muon, list(model.parameters()))
    expected = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    assert {call.args[0].dtype for call in product.call_args_list} == {expected}


def settings_of(model: Llama, **options: Any) -> dict[str, dict[str, Any]]:
    """The settings of each parameter, which is in one group of one optimizer, and the kind of that."""
    names, found = {id(weight): name for name, weight in model.named_parameters()}, list[tuple[str, dict]]()
    for optimizer in make_optimizers(model, TrainConfig(**options)):
        for group in optimizer.param_groups:
            found += [(names[id(weight)], group | {"kind": type(optimizer)}) for weight in group["params"]]
    assert len(found) == len(names)
    return dict(found)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_optimizer_and_settings_of_each_parameter(optimizer):
    options: dict[str, Any] = dict(norm="layernorm", tie_embeddings=False, attention_gate="element")
    model = Llama(dim=16, layers=2, heads=2, vocab_size=11, **options)
    for name, group in settings_of(model, optimizer=optimizer, weight_decay=0.3, lr=0.05, momentum=0.3).items():
        matrix = "_proj" in name
        assert group["lr"] == 0.05 * group["lr_ratio"] and group.get("momentum", 0.3) == 0.3
        assert group["weight_decay"] == (0.3 if matrix else 0.0), name
        assert group["kind"] is (Muon if optimizer == "muon" and matrix else AdamW), name


AROUND = ["0.attention_residual.norm", "0.mlp_residual.norm"]
DECAYED: dict[tuple[str, str], list[str]] = {
    ("pre", "none"): [],
    ("pre", "input"): [*AROUND, "final_norm"],
    ("pre", "all"): [*AROUND, "final_norm", "0.q_norm", "0.k_norm"],
    ("post", "input"): [],
    ("sandwich", "output"): ["0.attention_residual.norm_out", "0.mlp_residual.norm_out"],
    ("residual", "output"): AROUND,
    ("residual", "input"): ["final_norm.norm"],
    ("attnres", "input"): [*AROUND, "final_norm.norm"],
}


@pytest.mark.parametrize("optimizer, embedding", [("muon", 2.0), ("adamw", 1.0)])
@pytest.mark.parametrize("asked", DECAYED, ids="-".join)
def test_decayed_gains_and_the_rate_of_vectors_and_scalars(asked, optimizer, embedding):
    """Biases never are, whatever the norm. norms/test_placement.py has the output norms of every placement.

    The rate is of what norms and placements have, scales and queries, decayed or not. Matrices keep theirs.
    """
    model = Llama(dim=8, layers=1, placement=asked[0], norm="layernorm", qk_norm="head", scaled_embedding=True)
    found = settings_of(model, optimizer=optimizer, decay_gains=asked[1], weight_decay=0.3, vector_lr=0.25)
    rates = {name.replace("self_attn.", "").removeprefix("layers."): found[name]["weight_decay"] for name in found}
    decayed = {name: rate for name, rate in rates.items() if rate and "_proj" not in name}
    assert decayed == {f"{name}.weight": 0.3 for name in DECAYED[asked]}
    for name, group in found.items():
        vector, is_embedding = model.get_parameter(name).ndim < 2, name == "embed_tokens.weight"
        assert group["lr_ratio"] == (0.25 * embedding if vector else embedding if is_embedding else 1.0), name
