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
    monkeypatch.setattr("optim.ELEMENTS", 3 * 24 * 24)
    shapes = [(24, 24), (24, 40), (40, 24), (24, 24), (40, 24), (8, 24), (24, 24), (24, 24)]  # three at once
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


AROUND = ["attention_residual.norm", "mlp_residual.norm"]
DECAYED: dict[tuple[str, str], list[str]] = {  # norms of each block, and the last one
    ("pre", "none"): [],
    ("pre", "input"): [*AROUND, "final_norm"],
    ("pre", "all"): [*AROUND, "final_norm", "self_attn.q_norm", "self_attn.k_norm", "embed_tokens.norm"],
    ("post", "input"): [],
    ("sandwich", "output"): ["attention_residual.norm_out", "mlp_residual.norm_out"],
    ("residual", "output"): AROUND,
    ("residual", "input"): ["final_norm.norm"],
    ("attnres", "input"): [*AROUND, "final_norm.norm"],
}


@pytest.mark.parametrize("optimizer, ratio_of_others", [("muon", 2.0), ("adamw", 1.0)])
@pytest.mark.parametrize("asked", DECAYED, ids="-".join)
def test_optimizer_and_settings_of_each_parameter(asked, optimizer, ratio_of_others):
    """Biases are not decayed, whatever the norm. norms/test_placement.py has the output norms of every placement.

    Vectors and scalars have a rate of their own: those of norms, and scales and queries of placements.
    """
    options: dict[str, Any] = dict(placement=asked[0], norm="layernorm", qk_norm="head", attention_gate="element")
    model = Llama(dim=8, layers=2, scaled_embedding=True, embedding_norm="gain", tie_embeddings=False, **options)
    options = dict(optimizer=optimizer, decay_gains=asked[1], weight_decay=0.3, lr=0.05, momentum=0.3, vector_lr=0.25)
    decayed = {f"{block}{name}.weight" for name in DECAYED[asked] for block in ("layers.0.", "layers.1.", "")}
    names, found = {id(weight): name for name, weight in model.named_parameters()}, list[str]()
    made = make_optimizers(model, TrainConfig(**options))
    for kind, group in ((type(each), group) for each in made for group in each.param_groups):
        for weight in group["params"]:
            name = names[id(weight)]
            found.append(name)
            matrix = "_proj" in name
            assert kind is (Muon if optimizer == "muon" and matrix else AdamW), name
            assert group["lr_ratio"] == (1.0 if matrix else ratio_of_others * (0.25 if weight.ndim < 2 else 1.0)), name
            assert group["lr"] == 0.05 * group["lr_ratio"] and group.get("momentum", 0.3) == 0.3
            assert group["weight_decay"] == (0.3 if matrix or name in decayed else 0.0), name
    assert sorted(found) == sorted(names.values())
    assert all(f"{name}.weight" in " ".join(found) for name in DECAYED[asked])
