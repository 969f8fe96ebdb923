"""Norms called with a width that would broadcast, integers or negated views: an error, or the right result."""

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from norms import KINDS, TRAITS, build_norm
from norms.layernorm import LayerNorm
from norms.modules.images import ChannelsFirstLayerNorm, InstanceNorm
from norms.rmsnorm import RMSNorm
from runtime.acceleration import accelerate

WIDTH = 16
OWN = [kind for kind in sorted(KINDS) if not TRAITS[kind].identity and KINDS[kind].__module__.startswith("norms.")]
MAKERS: dict[str, Callable[[], nn.Module]] = {kind: partial(build_norm, kind, WIDTH) for kind in OWN}
MAKERS |= {f"fast {kind}": lambda make=make: accelerate(make()) for kind, make in list(MAKERS.items())}  # type: ignore
MAKERS |= {
    "rmsnorm without a gain": lambda: RMSNorm(WIDTH, elementwise_affine=False),
    "llama": lambda: RMSNorm(WIDTH, cast_order="llama"),
    "layernorm without a gain": lambda: LayerNorm(WIDTH, elementwise_affine=False),
    "fast layernorm over two axes": lambda: accelerate(LayerNorm([3, WIDTH])),
}
WAYS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "eager": lambda norm: norm,
    "without gradients": lambda norm: torch.no_grad()(norm.forward),
    "vmap": torch.func.vmap,
    "meta": lambda norm: lambda x: norm.to("meta")(x.to("meta")),
    "compile": lambda norm: torch.compile(norm, backend="eager"),
}


def test_a_wrong_call_of_a_norm_is_an_error(cases, record):
    """Every kind, with and without kernels, in training and evaluation, with 0 to 4 axes."""
    draw, refused = random.Random(0), 0
    for make in MAKERS.values():
        for _ in range(cases(4, 200)):
            axes = [draw.choice([1, 2, 3]) for _ in range(draw.randrange(4))]
            norm, way = make().train(draw.random() < 0.5), draw.choice(list(WAYS))
            if draw.random() < 0.5:
                width = draw.choice([1, 1, 2, 15, 17, 32])
                x, message = torch.ones(*axes, width), "cannot take the shape"
            else:
                dtype = draw.choice([torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64])
                x, message = torch.ones(*axes, 3, WIDTH, dtype=dtype), "needs floating-point numbers"
            if way == "vmap":
                x = x.unsqueeze(0)
            if way == "compile" and draw.random() < 0.9:
                way = "eager"  # which takes a hundredth of the time
            with pytest.raises(Exception, match=message):  # torch.compile wraps the error
                WAYS[way](norm)(x)
            refused += 1
    record(refused=refused)


@pytest.mark.parametrize("make", [ChannelsFirstLayerNorm, InstanceNorm])
@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 3, 4, 5), (2, 5, 4)], ids=str)
def test_norms_of_images_check_the_channels(make, shape):
    if shape[1] == 5:
        assert make(5)(torch.randn(shape)).shape == shape
        return
    with pytest.raises(ValueError, match="5 features cannot take"):
        make(5)(torch.randn(shape))


def negated(x: Tensor) -> Tensor:
    """x as a view of memory that holds -x, like the imaginary part of a conjugate, but contiguous."""
    view = torch._neg_view(-x)
    assert view.is_neg() and view.is_contiguous() and torch.equal(view, x)
    return view


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("training", [True, False])
def test_negated_views_are_read_as_what_they_show(name, training):
    """Input, parameters and incoming gradient."""
    generator = torch.Generator().manual_seed(0)
    x, grad_y = (torch.randn(4, 3, WIDTH, generator=generator) for _ in range(2))
    weights = {key: torch.rand(p.shape, generator=generator) for key, p in MAKERS[name]().named_parameters()}
    results = []
    for view in (torch.clone, negated):
        leaf, norm = x.clone().requires_grad_(), MAKERS[name]().train(training)
        y = torch.func.functional_call(norm, {key: view(weight) for key, weight in weights.items()}, (view(leaf),))
        y.backward(view(grad_y))
        results.append((y, leaf.grad))
    for plain, by_view in zip(*results, strict=True):
        torch.testing.assert_close(by_view, plain, rtol=1e-5, atol=1e-5)
