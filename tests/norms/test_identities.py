"""Two models that compute the same function: pre-LayerNorm, and pre-RMSNorm with centered weights.

Identities between single norms are in the test files of those norms.
"""

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from config import ModelConfig
from model import Llama, weights_by_role

LAYERNORM = ModelConfig(
    norm="layernorm",
    norm_args={"bias": False, "eps": 1e-5},
    dim=24,
    layers=3,
    heads=4,
    kv_heads=2,
    hidden_dim=40,
    context=10,
    vocab_size=29,
    tie_embeddings=False,
)
RMSNORM = dataclasses.replace(LAYERNORM, norm="rmsnorm", norm_args={"eps": 1e-5})
WRITERS = ("embedding", "attention_out", "down")  # the roles that write to the residual stream


def centered(role: str, weight: Tensor) -> Tensor:
    """The weight with zero-mean output over the features: rows of the embedding, columns of a matrix."""
    if role not in WRITERS:
        return weight
    return weight - weight.mean(1 if role == "embedding" else 0, keepdim=True)


def test_pre_layernorm_without_bias_equals_pre_rmsnorm_with_centered_weights():
    """Values, and gradients by the chain rule. Pre-RMSNorm and Pre-CRMSNorm Transformers, arXiv 2305.14858."""
    ln, rms = Llama(LAYERNORM).double(), Llama(RMSNORM).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in ln.parameters():
        scale = 1.0 if parameter.ndim == 1 else 2 / parameter.shape[-1] ** 0.5
        parameter.data = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    rms.load_state_dict(ln.state_dict(), strict=True)
    tokens, targets = torch.randint(29, (2, 3, 10), generator=generator)

    assert (rms(tokens) - ln(tokens)).abs().max() > 0.1  # before centering
    for role, _, weight in weights_by_role(rms):
        weight.data = centered(role, weight.data)
    logits = ln(tokens)
    torch.testing.assert_close(rms(tokens), logits, rtol=0, atol=1e-13 * logits.abs().max().item())

    for model in (ln, rms):  # model.loss would compute in fp32
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    roles = {weight: role for role, _, weight in weights_by_role(rms)}
    for (name, ours), theirs in zip(ln.named_parameters(), rms.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        expected = centered(roles.get(theirs, "norm"), theirs.grad)
        size = expected.abs().max().item()
        assert size > 1e-6, name
        torch.testing.assert_close(ours.grad, expected, rtol=0, atol=1e-12 * size, msg=name)
