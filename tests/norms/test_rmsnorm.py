"""RMSNorm: the order of cast and gain, and gains around 0. test_recipes.py has norms without a gain."""

from typing import Any

import pytest
import torch
from torch import Tensor

from norms.rmsnorm import RMSNorm
from tests.random_values import normal, randomize


def oracle(x: Tensor, state: dict[str, Tensor], eps: float = 1e-6) -> Tensor:
    return state["weight"] * x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()


def norm_and_input(dtype: torch.dtype, **norm_args) -> tuple[Any, Tensor]:
    return randomize(RMSNorm(512, **norm_args), gains=1), normal(64, 512, dtype=dtype)


@pytest.mark.parametrize("gain_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_llama_cast_order_is_bit_identical_to_transformers(dtype, gain_dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm, x = norm_and_input(dtype, cast_order="llama")
    norm.to(gain_dtype)
    theirs = LlamaRMSNorm(512, eps=1e-6).to(gain_dtype)
    theirs.load_state_dict(norm.state_dict(), strict=True)
    assert torch.equal(norm(x), theirs(x).to(dtype))  # theirs leaves the dtype of the gain where that is wider


@pytest.mark.parametrize("gain_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_zero_centered_gain_is_bit_identical_to_gemmas(gain_dtype):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    assert torch.equal(RMSNorm(4, zero_centered=True).state_dict()["weight"], torch.zeros(4))
    norm, x = norm_and_input(torch.bfloat16, zero_centered=True)
    theirs = GemmaRMSNorm(512, eps=1e-6)
    theirs.load_state_dict(norm.state_dict(), strict=True)
    assert torch.equal(norm.to(gain_dtype)(x), theirs.to(gain_dtype)(x))
