"""Registration of kinds, and the types of norm arguments."""

from typing import Any, Literal

import pytest
from torch import nn

from files import is_a
from norms.registry import KINDS, build_norm, parse_norm_args, register


def test_registering_a_kind_twice_is_refused():
    before = dict(KINDS)
    with pytest.raises(ValueError, match="norm 'rmsnorm' is registered twice"):
        register("rmsnorm")(nn.Identity)
    assert before == KINDS


@pytest.mark.parametrize(
    "annotation, valid, invalid",
    [
        (int, [3, -1], [True, 3.0, "3", None, [3]]),
        (float, [0.5, 2, float("nan")], [False, "0.5", None]),
        (bool, [True, False], [0, 1, "true", None]),
        (str, ["", "text"], [3, None, ["text"]]),
        (list[str], [[], ["a", "b"]], ["a", ["a", 3], [None], {}]),
        (dict[str, Any], [{}, {"a": [3]}], [[], "a", None]),
        (Literal["fp32", "llama"], ["fp32", "llama"], ["fp16", 3, [], None]),
    ],
    ids=str,
)
def test_is_a(annotation, valid, invalid):
    assert all(is_a(value, annotation) for value in valid)
    assert not any(is_a(value, annotation) for value in invalid)


@pytest.mark.parametrize(
    "norm_args, message",
    [
        ({"eps": "1e-5"}, "--norm-arg eps takes a number, not '1e-5'"),
        ({"bias": 0}, "--norm-arg bias takes true or false, not 0"),
        ({"size": 3}, "norm 'layernorm' has no argument 'size'; it takes eps, elementwise_affine, bias"),
    ],
    ids=str,
)
def test_norm_args_have_types(norm_args, message):
    with pytest.raises(ValueError) as excinfo:
        build_norm("layernorm", 8, **norm_args)
    assert str(excinfo.value) == message
    build_norm("layernorm", 8, eps=1, bias=False)
    assert parse_norm_args("layernorm", ["bias=False"]) == {"bias": False}


def test_optional_and_other_arguments_of_imported_norms(monkeypatch):
    class Mine(nn.Identity):
        def __init__(self, dim: int, eps: float | None = None, kind: Literal["a", "b"] | None = None):
            super().__init__()

    monkeypatch.setitem(KINDS, "mine", Mine)
    assert parse_norm_args("mine", ["eps=1e-5", "kind=b"]) == {"eps": 1e-5, "kind": "b"}
    with pytest.raises(ValueError, match="--norm-arg kind takes a or b, not 'c'"):
        parse_norm_args("mine", ["kind=c"])
