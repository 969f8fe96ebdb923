"""Loads the optional CPU kernels in fast/ for generation. Delete that package and everything still works."""

import torch

try:
    from fast import accelerate, unavailable
except ImportError as error:
    if error.name != "fast":
        raise

    def accelerate(model: torch.nn.Module) -> torch.nn.Module:
        return model

    def unavailable() -> str | None:
        return "the package fast/ is missing"


def resolve_fast(wanted: bool | None, device: torch.device, dtype: str = "auto", compiled: bool = False) -> bool:
    """Whether to use the kernels: by default, if they can be. Raises ValueError if they are `wanted` and cannot."""
    if wanted is False:
        return False
    if device.type != "cpu":
        reason: str | None = "they need --device cpu"
    elif dtype == "float16":
        reason = "they need --dtype float32 or bfloat16"
    elif compiled:
        reason = "they need --no-compile"
    else:
        reason = unavailable()
    if wanted and reason:
        raise ValueError(f"the kernels of --fast cannot be used: {reason}; use --no-fast")
    return reason is None


__all__ = ["accelerate", "resolve_fast", "unavailable"]
