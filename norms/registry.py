"""The registry: a kind of norm is a class, a name for the `--norm` flag, and the traits its tests hold it to."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import nn

Norm = TypeVar("Norm", bound=type[nn.Module])


@dataclass(frozen=True)
class Traits:
    """What a kind's formula promises. The contract tests check each trait both ways:
    what is claimed must hold, and what is disclaimed must really fail.

    The defaults describe RMSNorm; a kind names only where it differs.
    """

    per_token: bool = True  # a token's output depends on that token alone
    causal_in_training: bool = True  # no token sees a later one while training
    scale_invariant: bool = True  # N(cx) = N(x) for c > 0, as eps goes to 0
    shift_invariant: bool = False  # N(x + c) = N(x) for one c added to every feature
    exact_backward: bool = True  # the gradient is that of the forward formula
    identity: bool = False  # N(x) = x
    per_head: bool = True  # makes sense on the features of one attention head (QK-norm)


KINDS: dict[str, type[nn.Module]] = {}
TRAITS: dict[str, Traits] = {}


def register(kind: str, **traits: bool) -> Callable[[Norm], Norm]:
    """Offer the decorated class as `--norm kind`; `traits` are fields of `Traits` that differ from its defaults.

    The class takes the feature width first and every other argument by keyword with a default:
    those are what `--norm-arg` can set. One that has an argument called `site` is told where it
    stands ("attention", "mlp", "final", "query", "key" or "value").
    """

    def add(cls: Norm) -> Norm:
        assert kind not in KINDS, f"two norms are called {kind}"
        KINDS[kind], TRAITS[kind] = cls, Traits(**traits)
        return cls

    return add


def build_norm(kind: str, dim: int, *, site: str = "", **norm_args: Any) -> nn.Module:
    """Make the norm `kind` for `dim` features standing at `site`.

    Raises ValueError for an unknown kind, an unknown argument, or a value that the kind refuses.
    """
    check_norm(kind, norm_args)
    if "site" in inspect.signature(KINDS[kind]).parameters:
        norm_args["site"] = site
    return KINDS[kind](dim, **norm_args)


def check_norm(kind: str, norm_args: dict[str, Any]) -> None:
    """Raise ValueError, naming the choices, unless `kind` exists and takes all of `norm_args`."""
    known = _arguments(kind)
    for name, value in norm_args.items():
        if name not in known:
            offer = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"norm {kind!r} has no argument {name!r}; {offer}")
        if not is_a(value, known[name]):
            raise ValueError(f"--norm-arg {name} takes {_offer(known[name])}, not {value!r}")


def parse_norm_args(kind: str, texts: list[str]) -> dict[str, Any]:
    """Turn `["eps=1e-5", "bias=false"]` into `{"eps": 1e-5, "bias": False}`, by the types that `kind` declares.

    Raises ValueError for an unknown kind or argument and for a text that is not of its type.
    """
    known, norm_args = _arguments(kind), {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--norm-arg takes key=value, not {text!r}")
        norm_args[name] = _parse(value, known.get(name))
    check_norm(kind, norm_args)
    return norm_args


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a declared type; an integer will do for a float, but a bool will not for an integer."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return type(value) is list and all(is_a(item, *get_args(kind)) for item in value)
    return type(value) is (get_origin(kind) or kind) or (kind is float and type(value) is int)


def _arguments(kind: str) -> dict[str, Any]:
    """The types of what `--norm-arg` can set, by name: every constructor argument but the width and the site."""
    if kind not in KINDS:
        raise ValueError(f"unknown norm {kind!r}; choose from {', '.join(sorted(KINDS))}")
    constructor = KINDS[kind].__init__
    hints = get_type_hints(constructor)
    names = list(inspect.signature(constructor).parameters)[2:]
    return {name: hints.get(name, str) for name in names if name != "site"}


def _parse(text: str, kind: Any) -> Any:
    """The value that a text stands for, or else the text, which is then of the wrong type."""
    try:
        return {"true": True, "false": False}[text] if kind is bool else kind(text) if kind in (int, float) else text
    except (KeyError, ValueError):
        return text


def _offer(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")
