"""Shared by all norms: precision and argument checks."""

import math

import torch
from torch import Tensor

# Private: no public function tells whether make_fx is recording, or whether a tensor belongs to a transform of
# torch.func. A torch that lacks them is not checked.
proxy_mode = getattr(torch._C, "_get_dispatch_mode", None)
is_transformed = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)


def upcast(x: Tensor, *shape: int) -> Tensor:
    """x in the precision of statistics and gains: fp32, or float64 if x is float64.

    Raises ValueError unless x has floating-point numbers and, if `shape` is given, its last axes have these sizes.
    Sizes of 1 would broadcast, and integers would truncate the result.
    """
    if not x.is_floating_point():
        raise ValueError(f"a norm needs floating-point numbers, not {str(x.dtype).removeprefix('torch.')}")
    if shape and x.shape[-len(shape) :] != shape:
        expected = f"{shape[0]} features" if len(shape) == 1 else f"last axes {shape}"
        raise ValueError(f"a norm of {expected} cannot take the shape {tuple(x.shape)}")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_replaceable(x: Tensor) -> None:
    """Raise ValueError if a norm that gets x must not replace its running statistics.

    Under torch.func they would become tensors of the transform, and the graphs of make_fx and jit.trace would leave the
    replacement out. torch.compile and torch.export see it.
    """
    if torch.compiler.is_compiling():
        return
    recorded = torch.jit.is_tracing() or (proxy_mode and proxy_mode(torch._C._TorchDispatchModeKey.PROXY))
    if recorded or (is_transformed and is_transformed(x)):
        raise ValueError("running statistics cannot be updated under torch.func, make_fx or jit.trace; call eval()")


def rsqrt(x: Tensor) -> Tensor:
    """The value of torch.rsqrt, 1 / √x, with a gradient that is right up to x = 1e34 in fp32.

    The gradient of torch.rsqrt itself has 1/√x³, which underflows from x = 1e25 on.
    """
    y = x.sqrt().reciprocal()
    return y + (torch.rsqrt(x) - y).detach()


def center(x: Tensor, axes: int = 1) -> Tensor:
    """x − mean(x) over the last `axes` axes, for F.layer_norm, which subtracts the mean again.

    The gradient of F.layer_norm has the rounding error of its mean, divided by σ: in constant rows of 1e6 + 0.3, 20
    times the gradient. The mean needs no gradient here, because that of a shift-invariant function is 0.
    """
    return x - x.mean(tuple(range(-axes, 0)), keepdim=True).detach()


def check_arguments(*sizes: int, eps: float = 1.0) -> None:
    """Raise ValueError unless every size is at least 1 and eps is positive and finite."""
    if not sizes or min(sizes) < 1:
        raise ValueError(f"a norm needs at least 1 feature, not {', '.join(map(str, sizes)) or 'none'}")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps of a norm must be positive and finite, not {eps}")
