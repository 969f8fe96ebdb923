"""Attaches what is in fast/, for generation. Delete that package and everything still works, more slowly."""

from typing import Any

from model import Llama


def fast_decoder(model: Llama, samples: int, by_c: bool, compiled: bool) -> tuple[Any, str]:
    """A decoder of `model` for so many samples: compiled, or `by_c`, or else the model. And what to print about it."""
    if not (by_c or compiled):
        return model, ""
    try:
        from fast.compiled import CompiledDecoder
        from fast.decode import accelerate
    except ModuleNotFoundError as error:
        if error.name != "fast":
            raise
        return model, ", without fast/: the package is missing"
    decoder = CompiledDecoder(model) if compiled else accelerate(model, samples)
    if isinstance(decoder, str):
        return model, f", without fast/: {decoder}"
    return decoder, f", tokens {'compiled' if compiled else 'computed'} by fast/"
