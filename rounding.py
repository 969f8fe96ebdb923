"""Matrices in fewer bits, for a model that only generates: what a token costs is mostly to read every weight once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Linear, Llama


def round_weights(model: Llama, dtype: torch.dtype, pack: bool = True) -> None:
    """Turn every matrix product of `model` into one in `dtype`, for good: bfloat16, float16, or int8 on a CPU.

    The 16-bit ones compute what autocast does, without converting the weights for every token; int8 rounds them
    further. The embedding that tokens are looked up in, norms and the residual stream stay in float32, also where
    the embedding is the head besides. With `pack`, bfloat16 lies in memory the way the CPU's library likes it,
    which `torch.compile` would rather decide itself.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Linear):
                setattr(parent, name, _rounded(child.weight.detach(), dtype, pack))


def _rounded(weight: Tensor, dtype: torch.dtype, pack: bool) -> nn.Module:
    if dtype == torch.int8:
        return Int8Linear(weight)
    if dtype == torch.bfloat16 and weight.device.type == "cpu" and pack:
        return PackedLinear(weight)
    return HalfLinear(weight, dtype)


class HalfLinear(nn.Module):
    """x Wᵀ in a format of 16 bits, whatever that of x."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", weight.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight)


class PackedLinear(nn.Module):
    """`HalfLinear` in bfloat16 on a CPU, its weight in oneDNN's own layout: otherwise that is made anew every time."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.weight, None, "none", [], "")


class Int8Linear(nn.Module):
    """x Wᵀ with x in bfloat16 and each row of W as 127ths of its largest entry, a whole number of them."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight: Tensor
        self.steps: Tensor
        steps = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        self.register_buffer("steps", steps)
        self.register_buffer("weight", (weight / steps.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch._weight_int8pack_mm(x.bfloat16().flatten(0, -2), self.weight, self.steps)
        return y.view(*x.shape[:-1], -1)
