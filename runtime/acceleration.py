"""Attaches the optional C code in fast/ for generation. Delete that package and everything still works."""

from model import Llama

try:
    from fast import accelerate
except ImportError as error:
    if error.name != "fast":
        raise

    def accelerate(model: Llama, samples: int = 1) -> str | None:
        return "the package is missing"


def accelerate_decoding(model: Llama, samples: int) -> str:
    """Let C compute the tokens after a prompt if it can. Returns what to print about it."""
    reason = accelerate(model, samples)
    return f", without the C code in fast/: {reason}" if reason else ", tokens computed by fast/"
