"""Attaches the optional C code in fast/ for generation. Delete that package and everything still works."""

import torch

from model import Llama

try:
    from fast import accelerate
except ImportError as error:
    if error.name != "fast":
        raise

    def accelerate(model: Llama, samples: int = 1) -> str | None:
        return "the package is missing"


def accelerate_decoding(model: Llama, samples: int, device: torch.device, compiled: bool, wanted: bool | None) -> str:
    """Let C compute the tokens after a prompt if it can. Returns what to print about it.

    If `wanted` is None, plain PyTorch is used where C cannot be; if True, that raises ValueError.
    """
    if wanted is False or (wanted is None and (compiled or device.type != "cpu")):
        return ""
    if device.type != "cpu":
        reason: str | None = "it needs --device cpu"
    elif compiled:
        reason = "it needs --no-compile"
    else:
        reason = accelerate(model, samples)
    if wanted and reason:
        raise ValueError(f"--fast: {reason}; use --no-fast")
    return f", without the C code in fast/: {reason}" if reason else ", tokens computed by fast/"
