"""Optional kernels in C for x86-64 CPUs: decoding one token of each of a few sequences. `accelerate(model)` is the API.

It swaps the classes of modules for subclasses in this package. Parameters, state-dict keys and `isinstance` stay, and
`super().forward` is the formula, for everything the kernels do not support, training included. Nothing else in the
project depends on this package: without it, everything runs, and generates text more slowly.
"""

from torch import nn

from fast.decode import FastAttention, FastLlama, FastSwiGLU
from fast.native import unavailable

__all__ = ["accelerate", "unavailable"]


def accelerate(model: nn.Module) -> nn.Module:
    """Swap, in place, the class of every module that has a fast subclass. Returns `model`."""
    if unavailable() is None:
        fast = {cls.__base__: cls for cls in (FastAttention, FastSwiGLU, FastLlama)}
        for module in model.modules():
            module.__class__ = fast.get(type(module), type(module))
    return model
