"""RMSNorm: the order of cast and gain, and gains around 0. test_recipes.py has norms without a gain."""

import pytest
import torch
from torch import Tensor

from norms.rmsnorm import RMSNorm
from tests.random_values import normal, randomize


def oracle(x: Tensor, state: dict[str, Tensor], eps: float = 1e-6) -> Tensor:
    return state["weight"] * x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()


@pytest.mark.parametrize("gain_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family, norm_args", [("Llama", {"cast_order": "llama"}), ("Gemma", {"zero_centered": True})])
def test_casts_are_bit_identical_to_those_of_transformers(family, norm_args, dtype, gain_dtype):
    modeling = pytest.importorskip(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    theirs, norm = getattr(modeling, f"{family}RMSNorm")(512, eps=1e-6), RMSNorm(512, **norm_args)
    assert torch.equal(norm.state_dict()["weight"], theirs.weight)
    theirs.load_state_dict(randomize(norm, gains=1).state_dict(), strict=True)
    x = normal(64, 512, dtype=dtype)
    found, expected = norm.to(gain_dtype)(x), theirs.to(gain_dtype)(x)
    assert torch.equal(found, expected.to(dtype))  # Llama's leaves the dtype of the gain where that is wider
