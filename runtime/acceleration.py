"""Attaches what is in fast/, for generation. Delete that package and everything still works, more slowly."""

from collections.abc import Callable
from typing import Any

from model import Llama

accelerate: Callable | None = None
try:
    from fast.decode import accelerate
except ImportError as error:
    if error.name not in ("fast", "fast.decode"):
        raise


def fast_decoder(model: Llama, samples: int) -> tuple[Any, str]:
    """A decoder of `model` in C for so many samples, or else the model. And what to print about it."""
    decoder = accelerate(model, samples) if accelerate else "the package is missing"
    if isinstance(decoder, str):
        return model, f", without fast/: {decoder}"
    return decoder, ", tokens computed by fast/"
