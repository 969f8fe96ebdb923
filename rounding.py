"""Matrices for a model that only generates, in fewer bits if wanted: a token costs what reading its weights does."""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import decode
from model import Linear, Llama, Together
from norms import KINDS

FEW = {torch.float32: 32, torch.bfloat16: 12, torch.int8: sys.maxsize}  # rows of x up to which decode.c is faster


def round_weights(model: Llama, dtype: torch.dtype) -> None:
    """Turn every matrix product of `model` into one in `dtype`, for good: float32, bfloat16, float16, or int8 on a CPU.

    What reads the same x becomes one product. The embedding that tokens are looked up in, norms and the residual
    stream stay in float32, also where the embedding is the head besides. The 16-bit formats compute what autocast
    does, without converting the weights for every token. By decode.c, that is for a few tokens at a time and always
    in int8, only the weights are rounded: x stays in float32. One more token is a single call of C, which knows where
    the weights lie and what the norms are given: the model can no longer be moved or copied, and nothing in it be
    replaced, loaded or trained. Raises ValueError for a second time.
    """
    if model.embed_tokens.weight.dtype != torch.float32 or not any(isinstance(m, Linear) for m in model.modules()):
        raise ValueError("only a model in float32 can be rounded, and only once")
    for parent in list(model.modules()):
        for name, together in [(name, value) for name, value in vars(parent).items() if isinstance(value, Together)]:
            weights = [part.weight.detach() for part in together.parts]
            for part in [part for part, module in parent.named_children() if module in together.parts]:
                delattr(parent, part)
            setattr(parent, name, _rounded(torch.cat(weights), dtype))
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear):
                _replace(parent, name, _rounded(child.weight.detach(), dtype))
            if isinstance(child, nn.Identity | nn.Dropout):
                _replace(parent, name, _same)
    if isinstance(model.lm_head, FewRows):
        _by_kernels(model, FEW[dtype])
    for block in model.layers:
        for parent in (block, *block.children()):
            for name, child in parent.named_children():
                vars(parent).setdefault(name, child.forward)  # found before the module, whose call takes long


def _by_kernels(model: Llama, most: int) -> None:
    """One more token for each of up to `most` sequences in one call of C."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) in KINDS.values():
                vars(parent)[name] = decode.Norm(child)  # found before the module
    for block in model.layers:
        _replace(block, "self_attn", decode.Attention(block.self_attn))
        _replace(block, "mlp", decode.MLP(block.mlp))
    vars(model)["next_logits"] = decode.OneMoreToken(model, most)


def _replace(parent: nn.Module, name: str, product: Callable) -> None:
    """By something that is no module: the call of one takes longer than that of a kernel."""
    delattr(parent, name)
    setattr(parent, name, product)


def _same(x: Tensor) -> Tensor:
    return x


def _rounded(weight: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    if weight.device.type != "cpu" or dtype == torch.float16:
        return PlainProduct(weight, dtype)
    if dtype == torch.int8:
        int8 = Int8Product(weight)
        return FewRows(decode.Product(int8.weight, int8.steps), FEW[dtype], int8) if decode.available() else int8
    many = PackedProduct(weight) if dtype == torch.bfloat16 else PlainProduct(weight, dtype)
    return FewRows(decode.Product(weight.to(dtype)), FEW[dtype], many) if decode.available() else many


class FewRows:
    """x Wᵀ in float32: by decode.c for a few rows x, which costs what reading W costs; by `many` for more."""

    def __init__(self, few: decode.Product, rows: int, many: Callable[[Tensor], Tensor]):
        self.few, self.many, self.most = few, many, rows * few.inputs

    def __call__(self, x: Tensor) -> Tensor:
        return self.few(x) if x.numel() <= self.most else self.many(x).float()


class PlainProduct:
    """x Wᵀ in a format of 16 or 32 bits, whatever that of x."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        self.weight = weight.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight)


class PackedProduct:
    """x Wᵀ in bfloat16 on a CPU, W in oneDNN's own layout: otherwise that is made anew every time."""

    def __init__(self, weight: Tensor):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.weight, None, "none", [], "")


class Int8Product:
    """x Wᵀ with x in bfloat16 and each row of W as 127ths of its largest entry, a whole number of them."""

    def __init__(self, weight: Tensor):
        steps = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        self.steps = steps
        self.weight = (weight / steps.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)

    def __call__(self, x: Tensor) -> Tensor:
        y = torch._weight_int8pack_mm(x.bfloat16().flatten(0, -2), self.weight, self.steps)
        return y.view(*x.shape[:-1], -1)
