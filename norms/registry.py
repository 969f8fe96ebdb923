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
    """Raise ValueError, naming the choices, unless `kind` exists and has all of `norm_args`."""
    if kind not in KINDS:
        raise ValueError(f"unknown norm {kind!r}; choose from {', '.join(sorted(KINDS))}")
    known = _arguments(kind)
    for name in norm_args:
        if name not in known:
            offer = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"norm {kind!r} has no argument {name!r}; {offer}")


def parse_norm_args(kind: str, texts: list[str]) -> dict[str, Any]:
    """Turn `["eps=1e-5", "bias=false"]` into `{"eps": 1e-5, "bias": False}`, by the types that `kind` declares.

    Raises ValueError for an unknown kind or argument and for a text that is not of its type.
    """
    norm_args = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--norm-arg takes key=value, not {text!r}")
        check_norm(kind, {name: value})
        norm_args[name] = _parse(name, value, _arguments(kind)[name])
    return norm_args


def _arguments(kind: str) -> dict[str, Any]:
    """The types of what `--norm-arg` can set, by name: every constructor argument but the width and the site."""
    constructor = KINDS[kind].__init__
    hints = get_type_hints(constructor)
    names = list(inspect.signature(constructor).parameters)[2:]
    return {name: hints.get(name, str) for name in names if name != "site"}


def _parse(name: str, text: str, kind: Any) -> Any:
    choices = get_args(kind) if get_origin(kind) is Literal else ("true", "false") if kind is bool else ()
    if choices and text not in choices:
        raise ValueError(f"--norm-arg {name} takes {' or '.join(choices)}, not {text!r}")
    if kind is bool:
        return text == "true"
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        raise ValueError(f"--norm-arg {name} takes a number, not {text!r}") from None
