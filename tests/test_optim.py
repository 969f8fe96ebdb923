"""Muon step by step, and which parameter gets which optimizer."""

import copy

import torch
from torch.optim import AdamW

from config import ModelConfig, TrainConfig
from model import Llama
from optim import Muon, make_optimizers
from runtime.device import has_bfloat16

STEPS = 4


def random_walk(optimizer, weights, seed=0):
    """Take a few steps on random gradients; returns them, steps × weights."""
    generator = torch.Generator().manual_seed(seed)
    history = []
    for _ in range(STEPS):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        history.append([weight.grad.clone() for weight in weights])
        optimizer.step()
    return history


def muon_by_singular_values(weight, gradients, lr, decay, momentum):
    """In float64 and by SVD: the iteration is an odd polynomial, so it acts on each singular value alone."""
    mean = torch.zeros_like(weight)
    for gradient in gradients:
        mean = momentum * mean + (1 - momentum) * gradient
        u, s, vt = torch.linalg.svd(momentum * mean + (1 - momentum) * gradient, full_matrices=False)
        s = s / s.square().sum().sqrt()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        weight = weight - lr * decay * weight - lr * 0.2 * max(weight.shape) ** 0.5 * (u * s) @ vt
    return weight


def test_muon_is_its_formula():
    shapes = [(24, 24), (24, 40), (40, 24), (24, 24), (40, 24), (8, 24)]
    starts = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    weights = [torch.nn.Parameter(start.clone()) for start in starts]
    gradients = random_walk(Muon([{"params": weights, "weight_decay": 0.02}], 0.05, momentum=0.85), weights)
    # The iteration rounds fifteen products to 2⁻⁹ in bf16, at random: 0.010 to 0.012 measured.
    tolerance = 0.02 if has_bfloat16(torch.device("cpu")) else 1e-5
    for number, start in enumerate(starts):
        mine = [step[number].double() for step in gradients]
        expected = muon_by_singular_values(start.double(), mine, lr=0.05, decay=0.02, momentum=0.85)
        moved = (expected - start).norm()
        assert (weights[number] - expected).norm() < tolerance * moved, tuple(start.shape)


def test_only_matrices_in_blocks_decay_and_each_weight_has_one_optimizer():
    model = Llama(ModelConfig(dim=16, layers=2, heads=2, vocab_size=11, norm="layernorm", tie_embeddings=False))
    names = {id(weight): name for name, weight in model.named_parameters()}
    for optimizer in ("muon", "adamw"):
        optimizers = make_optimizers(model, TrainConfig(optimizer=optimizer, weight_decay=0.3))
        groups = [group for each in optimizers for group in each.param_groups]
        decay = {names[id(weight)]: group["weight_decay"] for group in groups for weight in group["params"]}
        assert len(decay) == sum(len(group["params"]) for group in groups) == len(names)
        for name, rate in decay.items():
            assert rate == (0.3 if "_proj" in name else 0.0), name
        by_kind = {names[id(w)]: type(each) for each in optimizers for g in each.param_groups for w in g["params"]}
        for name, kind in by_kind.items():
            assert kind is (Muon if optimizer == "muon" and "_proj" in name else AdamW), name


def test_weights_without_a_gradient_stay():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    Muon([{"params": [weight], "weight_decay": 0.3}], lr=0.05, momentum=0.9).step()
    assert torch.equal(weight, torch.ones(4, 4))


def test_muon_s_state_survives_a_round_trip():
    """It is an ordinary torch optimizer: state_dict, load_state_dict and add_param_group work."""
    first, second = (torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    one, other = (Muon([{"params": [w], "weight_decay": 0.1}], lr=0.05, momentum=0.9) for w in (first, second))
    random_walk(one, [first])
    second.data.copy_(first.data)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    random_walk(one, [first], seed=1)
    random_walk(other, [second], seed=1)
    assert torch.equal(first, second)
    third = torch.nn.Parameter(torch.ones(4, 6))
    other.add_param_group({"params": [third], "weight_decay": 0.0})
    random_walk(other, [second, third])
    assert not torch.equal(third, torch.ones(4, 6))
