"""Registration of kinds, and arguments of norms as text."""

from typing import Literal

import pytest
from torch import nn

from norms.registry import KINDS, TRAITS, parse_norm_args, register


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
        def __init__(self, dim: int, eps: float | None = None, kind: Literal["a", "b"] | None = None):
            super().__init__()

    monkeypatch.setitem(KINDS, "mine", Mine)
    assert parse_norm_args("mine", ["eps=1e-5", "kind=b"]) == {"eps": 1e-5, "kind": "b"}
    assert parse_norm_args("layernorm", ["bias=False"]) == {"bias": False}
    with pytest.raises(ValueError, match="--norm-arg kind takes a or b, not 'c'"):
        parse_norm_args("mine", ["kind=c"])
