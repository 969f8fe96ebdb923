"""The registry of norms: each kind is a class, a name for the `--norm` flag, and traits that its tests check."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from torch import nn

from files import is_a, require
from norms.numerics import FP32

NormClass = TypeVar("NormClass", bound=type[nn.Module])


@dataclass(frozen=True)
class Traits:
    """Properties of a kind's formula. The defaults describe RMSNorm; a kind declares only what differs.

    The contract tests check that each property holds where it is claimed and fails where it is not.
    """

    per_token: bool = True  # a token's output depends on that token alone
    causal_in_training: bool = True  # no token sees a later one during training
    scale_invariant: bool = True  # N(cx) = N(x) for c > 0, as eps goes to 0
    shift_invariant: bool = False  # N(x + c) = N(x) for the same c added to every feature
    identity: bool = False  # N(x) = x
    per_head: bool = True  # can be applied to the features of one attention head (QK-norm)


KINDS: dict[str, type[nn.Module]] = {}
TRAITS: dict[str, Traits] = {}
EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def register(kind: str, **traits: bool) -> Callable[[NormClass], NormClass]:
    """Make the decorated class available as `--norm kind`; `traits` override the defaults of `Traits`.

    The constructor takes the feature width first. Its other arguments are keywords with defaults, which
    `--norm-arg` can set. An argument called `site` cannot be set; it receives the position of the norm in
    the model ("attention", "mlp", "final", "query", "key", "value" or "inner"). Raises ValueError for a
    name that exists, and for what is no class of modules.
    """

    def add(cls: NormClass) -> NormClass:
        require(kind not in KINDS, f"norm {kind!r} is registered twice; choose another name")
        a_module = isinstance(cls, type) and issubclass(cls, nn.Module)
        require(a_module, f"norm {kind!r} must be a class that extends torch.nn.Module, not {cls!r}")
        per_token = {"per_token": traits.get("causal_in_training", True)}  # later tokens are other tokens
        KINDS[kind], TRAITS[kind] = cls, Traits(**per_token | traits)
        return cls

    return add


def build_norm(kind: str, dim: int, site: str = "", /, **norm_args: Any) -> nn.Module:
    """Make the norm `kind` for `dim` features at `site`.

    Raises ValueError, listing the choices, unless `kind` exists and accepts all of `norm_args`.
    """
    require(kind in KINDS, f"unknown norm {kind!r}; choose from {', '.join(sorted(KINDS))}")
    check_arguments(f"norm {kind!r}", KINDS[kind], norm_args)
    if "site" in inspect.signature(KINDS[kind]).parameters:
        norm_args["site"] = site
    return KINDS[kind](dim, **norm_args)


def check_arguments(what: str, constructor: Any, given: dict[str, Any]) -> None:
    """Raise ValueError, naming `what` and the choices, unless `constructor` takes all keywords `given`.

    Its first argument, which says for how many features or where, and `site` are not for the user.
    """
    hints = get_type_hints(constructor if inspect.isfunction(constructor) else constructor.__init__)
    arguments = list(inspect.signature(constructor).parameters.values())[1:]
    types = {each.name: hints.get(each.name, type(each.default)) for each in arguments if each.name != "site"}
    for name, value in given.items():
        require(name in types, f"{what} has no argument {name!r}; it takes {', '.join(types) or 'none'}")
        wanted = types[name]
        wanted = get_args(wanted)[0] if type(None) in get_args(wanted) else wanted
        if not is_a(value, wanted):
            choices = " or ".join(map(str, get_args(wanted)))  # for a Literal
            raise ValueError(f"argument {name} of {what} takes {EXPECTED.get(wanted, choices)}, not {value!r}")
        if wanted is float and value and not FP32.tiny <= abs(value) <= FP32.max:
            raise ValueError(f"argument {name} of {what} is beyond float32: {value}")
