"""Attaches what is in fast/. Delete that package and everything still works, more slowly."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim import Optimizer

from files import warn
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


def captured_step(step: Callable, optimizers: list[Optimizer], device: torch.device, captured: bool) -> Callable:
    """A training step, `captured` as a CUDA graph or as it is. Its arguments are inputs, targets and learning rate."""
    if not captured:
        return step
    if not find_spec("fast"):
        warn("no CUDA graph, without fast/: the package is missing")
        return step
    from fast.graph import CapturedStep

    return CapturedStep(step, optimizers, device)
