"""Registration of kinds, and the types of norm arguments."""

from typing import Any, Literal

import pytest
from torch import nn

from norms.registry import KINDS, build_norm, is_a, register


def test_a_kind_is_registered_once():
    before = dict(KINDS)
    with pytest.raises(AssertionError, match="norm 'rmsnorm' is registered twice"):
        register("rmsnorm")(nn.Identity)
    assert before == KINDS


@pytest.mark.parametrize(
    "kind, fitting, others",
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
def test_values_and_types(kind, fitting, others):
    assert all(is_a(value, kind) for value in fitting)
    assert not any(is_a(value, kind) for value in others)


@pytest.mark.parametrize(
    "norm_args, complaint",
    [
        ({"eps": "1e-5"}, "--norm-arg eps takes a number, not '1e-5'"),
        ({"bias": 0}, "--norm-arg bias takes true or false, not 0"),
        ({"size": 3}, "norm 'layernorm' has no argument 'size'; it takes eps, elementwise_affine, bias"),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_type_are_refused(norm_args, complaint):
    with pytest.raises(ValueError) as raised:
        build_norm("layernorm", 8, **norm_args)
    assert str(raised.value) == complaint
    build_norm("layernorm", 8, eps=1, bias=False)
