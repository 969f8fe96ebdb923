"""Arguments and traits of norms."""

from typing import Literal

import pytest
from torch import nn

from norms.registry import Traits, build_norm, check_arguments, register
from runtime.flags import read_pairs


def test_optional_and_other_arguments_of_imported_norms(monkeypatch):
    class Mine(nn.Identity):
        def __init__(self, dim: int, eps: float | None = None, kind: Literal["a", "b"] | None = None, size=8, site=""):
            super().__init__()

    monkeypatch.setattr("norms.registry.KINDS", {})
    monkeypatch.setattr("norms.registry.TRAITS", traits := dict[str, Traits]())
    register("mine", causal_in_training=False)(Mine)
    assert not traits["mine"].per_token, "later tokens are other tokens"
    for norm_args in (read_pairs("--norm-arg", ["eps=1e-5", "kind=b", "size=3"]), {"eps": -1}, {"eps": 0}):
        assert type(build_norm("mine", 8, **norm_args)) is Mine
    wrong = {"kind=c": "kind of norm 'mine' takes a or b, not 'c'", "eps=b": "takes a number, not 'b'"}
    wrong |= {"size=3.5": "takes an integer, not 3.5", "eps=true": "takes a number, not True"}
    wrong |= {"dim=3": "no argument 'dim'; it takes eps, kind, size", "site=mlp": "no argument 'site'"}
    for text, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            check_arguments("norm 'mine'", Mine, read_pairs("--norm-arg", [text]))
    with pytest.raises(ValueError, match="norm 'function' must be a class"):
        register("function")(lambda dim: nn.Identity())  # type: ignore[type-var]
