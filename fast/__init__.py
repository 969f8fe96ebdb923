"""Optional code for faster generation: C on x86-64 CPUs, and torch.compile. Without this package, everything runs."""

from typing import Any

from model import Llama


def decoder(model: Llama, samples: int, compiled: bool) -> Any:
    """A decoder of `model`, with `torch.compile` or in C, or why it cannot be used."""
    if compiled:
        from fast.compiled import CompiledDecoder

        return CompiledDecoder(model)
    from fast.decode import accelerate

    return accelerate(model, samples)
