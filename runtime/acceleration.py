"""Attaches what is in fast/. Delete that package and everything still works, more slowly."""

from importlib.util import find_spec
from typing import Any

from model import Llama


def fast_decoder(model: Llama, samples: int, by_c: bool, compiled: bool) -> tuple[Any, str]:
    """A decoder of `model` for so many samples: compiled, or `by_c`, or else the model. And what to print about it."""
    if not (by_c or compiled):
        return model, ""
    if not find_spec("fast"):
        return model, ", without fast/: the package is missing"
    from fast.compiled import CompiledDecoder
    from fast.decode import accelerate

    decoder = CompiledDecoder(model) if compiled else accelerate(model, samples)
    if isinstance(decoder, str):
        return model, f", without fast/: {decoder}"
    return decoder, f", tokens {'compiled' if compiled else 'computed'} by fast/"
