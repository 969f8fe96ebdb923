"""Optional kernels in C for x86-64 CPUs. `accelerate(model)` is the whole API.

It swaps the classes of modules for subclasses in this package. Parameters, state-dict keys and `isinstance` stay, and
`super().forward` is the formula, for everything the kernels do not support. Nothing else in the project depends on this
package: without it, everything runs, slower.
"""

from torch import nn

from fast.allocator import keep_freed_memory
from fast.modules import FastAttention, FastLlama, FastSwiGLU
from fast.native import unavailable
from fast.norms import FastLayerNorm, FastRMSNorm

__all__ = ["accelerate", "unavailable"]

FAST: tuple[type[nn.Module], ...] = (FastRMSNorm, FastLayerNorm, FastAttention, FastSwiGLU, FastLlama)


def accelerate(model: nn.Module) -> nn.Module:
    """Swap, in place, the class of every module that has a fast subclass. Returns `model`."""
    keep_freed_memory()
    if unavailable() is None:
        fast = {cls.__base__: cls for cls in FAST}
        for module in model.modules():
            if type(module) in fast:
                module.__class__ = fast[type(module)]
    return model
