"""Random values and weights for tests, the same on every device."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def drawn(seed: int, name: str, shape: torch.Size) -> Tensor:
    """The initial weight of a matrix with a Hugging Face name, before it is scaled."""
    digest = hashlib.sha256(f"{seed} {name} {tuple(shape)}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")))


def randomize(module: nn.Module, matrices: float = 1.0, gains: float = 0.3, seed: int = 0) -> Any:
    """The module in evaluation mode, with weights large enough that each affects the output.

    A matrix makes features `matrices` times as large as its inputs. Gains spread by `gains` around 1, biases around 0.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 2:
                weight.copy_(matrices * noise / math.sqrt(weight.shape[-1]))
            else:
                weight.copy_(gains * noise + (0 if name.endswith("bias") else 1))
    return module.eval()


@contextmanager
def fp32_is_float64() -> Iterator[None]:
    """Both models compute norms, softmax and rotary angles in fp32, whatever their dtype. Make that float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield
