"""The seam to fast/: optional CPU kernels. Delete that package and everything still works, slower."""

import torch

try:
    from fast import accelerate, unavailable
except ImportError as error:
    if error.name != "fast":
        raise

    def accelerate(module: torch.nn.Module) -> torch.nn.Module:
        return module

    def unavailable() -> str | None:
        return "the package fast/ is missing"


def resolve_fast(wanted: bool | None, device: torch.device, compiled: bool = False) -> bool:
    """Whether to use the kernels: by default on a CPU without torch.compile, where they are available.

    Raises ValueError where they are `wanted` and cannot be used.
    """
    if wanted is False:
        return False
    reason = "it needs --device cpu" if device.type != "cpu" else "it needs --no-compile" if compiled else unavailable()
    if wanted and reason:
        raise ValueError(f"--fast is not possible: {reason}; use --no-fast")
    return reason is None


__all__ = ["accelerate", "resolve_fast", "unavailable"]
