"""DyT: the initial value of α, by site."""

import pytest
from torch import Tensor

from model import Llama
from norms import build_norm
from norms.dyt import DyT
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


@pytest.mark.parametrize(
    ("norm_args", "attention", "elsewhere"),
    [({}, 0.5, 0.5), ({"alpha": 0.2, "attention_ratio": 4.0}, 0.8, 0.2), ({"alpha": 2}, 2, 2)],
    ids=str,
)
def test_initial_alpha_depends_on_the_site(norm_args, attention, elsewhere):
    """The second case has the values of the paper's LLaMA 7B."""
    for site in ("attention", "mlp", "final", "query", "key", "value"):
        expected = attention if site == "attention" else elsewhere
        norm = build_norm("dyt", 8, site=site, **norm_args)
        assert isinstance(norm, DyT) and norm.alpha.shape == (1,)
        assert norm.alpha.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "ngpt"])
def test_model_passes_the_site_to_its_norms(placement):
    model = Llama(norm="dyt", norm_args={"alpha": 0.2, "attention_ratio": 4.0}, placement=placement, dim=32, heads=2)
    alphas = {name: alpha.item() for name, alpha in model.named_parameters() if name.endswith("alpha")}
    assert alphas
    for name, alpha in alphas.items():
        assert alpha == pytest.approx(0.8 if "attention" in name else 0.2), name


@pytest.mark.parametrize(
    "norm_args", [{"alpha": 0.0}, {"alpha": -1.0, "attention_ratio": -1.0}, {"attention_ratio": 0.0}]
)
def test_invalid_initial_alpha_is_refused(norm_args):
    with pytest.raises(ValueError, match="alpha and attention_ratio of dyt must be positive"):
        DyT(8, **norm_args)
