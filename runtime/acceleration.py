"""Attaches what is in fast/, for generation. Delete that package and everything still works, more slowly."""

from typing import Any

from model import Llama

try:
    import fast
except ImportError as error:
    if error.name != "fast":
        raise
    fast = None  # type: ignore[assignment]


def fast_decoder(model: Llama, samples: int, by_c: bool, compiled: bool) -> tuple[Any, str]:
    """A decoder of `model` for so many samples: compiled, or `by_c`, or else the model. And what to print about it."""
    if not (by_c or compiled):
        return model, ""
    decoder = "the package is missing" if fast is None else fast.decoder(model, samples, compiled)
    if isinstance(decoder, str):
        return model, f", without fast/: {decoder}"
    return decoder, f", tokens {'compiled' if compiled else 'computed'} by fast/"
