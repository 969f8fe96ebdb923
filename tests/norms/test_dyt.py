"""DyT, and Derf: the initial value of α, by site."""

import pytest
from torch import Tensor

from model import Llama
from norms.placement import PLACEMENTS


def oracle(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    exp = (2 * state["alpha"] * x).clamp(-80, 80).exp()  # beyond 80 tanh is exactly 1
    return state["weight"] * (exp - 1) / (exp + 1) + state["bias"]


def error_bound(x: Tensor, state: dict[str, Tensor], eps: float, **norm_args) -> Tensor:
    """Rounding of α·x as propagated by tanh, of tanh, gain and bias, and of the oracle. Measured: 0.6 of this bound."""
    inner = state["alpha"] * x
    tanh = inner.tanh()
    propagated = (inner * (1 - tanh**2)).abs()
    oracle_error = 2**-50 * state["weight"].abs()
    return eps * ((propagated + 2 * tanh.abs()) * state["weight"].abs() + state["bias"].abs()) + oracle_error


CELLS = [("dyt", name) for name in PLACEMENTS if name != "ngpt"] + [("derf", "pre")]


@pytest.mark.parametrize("kind, placement", CELLS)
def test_model_passes_the_site_to_its_norms(kind, placement):
    norm_args = {"alpha": 2, "attention_ratio": 4}
    model = Llama(norm=kind, norm_args=norm_args, placement=placement, qk_norm="head", dim=32, heads=2)
    alphas = {name: alpha.item() for name, alpha in model.named_parameters() if name.endswith("alpha")}
    assert alphas and alphas == {name: 8 if "attention" in name else 2 for name in alphas}
