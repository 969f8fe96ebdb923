"""Muon and AdamW step by step; what a run makes of them is in test_train.py."""

import subprocess
import sys

import pytest
import torch

from machine import has_bfloat16
from optim import AdamW, Muon

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


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_is_torch_s_to_the_bit(decay):
    shapes = [(24, 40), (24,), (1,)]
    starts = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    groups = [{"params": theirs, "weight_decay": decay}]
    random_walk(torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95), fused=True), theirs)
    random_walk(AdamW([{"params": ours, "weight_decay": decay}], lr=0.05), ours)
    for mine, yours in zip(ours, theirs, strict=True):
        assert torch.equal(mine, yours)


def test_weights_without_a_gradient_stay():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    Muon([{"params": [weight], "weight_decay": 0.3}], lr=0.05, momentum=0.9).step()
    AdamW([{"params": [weight], "weight_decay": 0.3}], lr=0.05).step()
    assert torch.equal(weight, torch.ones(4, 4))


def test_a_step_does_without_torch_s_compiler():
    """Importing it takes longer than a hundred steps of a small model."""
    steps = """
import sys, torch
from optim import AdamW, Muon
weight = torch.nn.Parameter(torch.ones(4, 4))
weight.grad = torch.ones(4, 4)
Muon([{"params": [weight], "weight_decay": 0.3}], lr=0.05, momentum=0.9).step()
AdamW([{"params": [weight], "weight_decay": 0.3}], lr=0.05).step()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", steps], check=True)
