"""Attaches the optional C code in fast/ for generation. Delete that package and everything still works."""

from typing import Any

from model import Llama

try:
    from fast import accelerate
except ImportError as error:
    if error.name != "fast":
        raise

    def accelerate(model: Llama, samples: int = 1) -> Any:
        return "the package is missing"


def fast_decoder(model: Llama, samples: int) -> tuple[Any, str]:
    """A decoder that lets C compute the tokens after a prompt, or else `model`; and what to print about it."""
    decoder = accelerate(model, samples)
    if isinstance(decoder, str):
        return model, f", without the C code in fast/: {decoder}"
    return decoder, ", tokens computed by fast/"
