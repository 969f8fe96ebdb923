"""Registration of kinds, and arguments of norms."""

import math
from typing import Literal

import pytest
from torch import nn

from norms.registry import KINDS, TRAITS, build_norm, check_arguments, register
from runtime.flags import read_pairs


def test_registering_a_kind_twice_is_refused():
    before = dict(KINDS)
    with pytest.raises(ValueError, match="norm 'rmsnorm' is registered twice"):
        register("rmsnorm")(nn.Identity)
    assert before == KINDS


def test_a_norm_that_sees_later_tokens_is_not_per_token():
    register("mine", causal_in_training=False)(nn.Identity)
    assert KINDS.pop("mine") and not TRAITS.pop("mine").per_token


def test_optional_and_other_arguments_of_imported_norms(monkeypatch):
    class Mine(nn.Identity):
        def __init__(self, dim: int, eps: float | None = None, kind: Literal["a", "b"] | None = None, size=8, site=""):
            super().__init__()

    monkeypatch.setitem(KINDS, "mine", Mine)
    for norm_args in (read_pairs("--norm-arg", ["eps=1e-5", "kind=b", "size=3"]), {"eps": 1}):
        assert type(build_norm("mine", 8, **norm_args)) is Mine
    wrong = {"kind=c": "kind of norm 'mine' takes a or b, not 'c'", "eps=b": "takes a number, not 'b'"}
    wrong |= {"size=3.5": "takes an integer, not 3.5", "eps=true": "takes a number, not True"}
    wrong |= {"dim=3": "no argument 'dim'; it takes eps, kind, size", "site=mlp": "no argument 'site'"}
    for text, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            check_arguments("norm 'mine'", Mine, read_pairs("--norm-arg", [text]))


ALPHAS: list[dict[str, float]] = [{"alpha": a} for a in (0.0, -1.0, math.inf, math.nan)]
ALPHAS += [{"alpha": -1.0, "attention_ratio": -1.0}, {"attention_ratio": 0.0}]
OUT_OF_RANGE: list[tuple[str, list[dict[str, float]], str]] = [
    ("batchnorm", [{"momentum": m} for m in (0.0, -0.1, 1.5, math.nan)], "momentum of batchnorm must be above 0"),
    ("powernorm", [{"momentum": m} for m in (1.0, -0.1, math.nan)], "momentum of powernorm must be at least 0"),
    ("prmsnorm", [{"p": p} for p in (0.0, -0.5, 1.01, math.nan)], "p of prmsnorm, .+, must be above 0 and at most 1"),
    *((kind, ALPHAS, f"alpha and attention_ratio of {kind} must be positive") for kind in ("dyt", "derf")),
]


@pytest.mark.parametrize("kind, refused, message", OUT_OF_RANGE)
def test_arguments_out_of_range_are_refused(kind, refused, message):
    for norm_args in refused:
        with pytest.raises(ValueError, match=message):
            build_norm(kind, 8, **norm_args)
