"""A model that several ranks train together: the whole of it on each (DDP), or a part of every tensor (FSDP2)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel

from machine import distributed


class Parallel:
    """The objective of `model`, which may be `compiled`, with gradients averaged over the ranks."""

    def __init__(self, model: Any, shard: bool, device: torch.device, dtype: torch.dtype, compiled: bool = False):
        self.model, self.shard = model, shard
        if shard:
            shard_weights(model, device, dtype)  # adds hooks to `model.objective`
        self.objective: nn.Module = Objective(model, compiled)
        if distributed.world_size() > 1 and not shard:
            # Rotary tables never change, and norms with running statistics are refused.
            self.objective = DistributedDataParallel(self.objective, gradient_as_bucket_view=True)
            self.objective.broadcast_buffers = False  # the argument is deprecated, and older versions have no other

    def micro_batches(self, batches: list[Any]) -> Iterator[Any]:
        """`batches`. Gradients are averaged in the last backward pass only, over what all have accumulated."""
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            if self.shard:
                self.model.set_requires_gradient_sync(last)
            with nullcontext() if last else getattr(self.objective, "no_sync", nullcontext)():  # DDP has one
                yield batch


class Objective(nn.Module):
    """The objective as the forward pass of a module, for DDP. It may be `compiled`: blocks of a kind share one graph.

    Outside of a call the model is plain, so evaluations and samples compile nothing. Hooks on blocks, such as those
    that gather sharded weights, stay outside the graphs.
    """

    def __init__(self, model: Any, compiled: bool = False):
        super().__init__()
        self.model = model
        parts = [(block, "forward") for block in model.layers] + [(model, "terms")]
        self.compiled = [(*part, torch.compile(getattr(*part))) for part in parts if compiled]

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        with ExitStack() as plain:
            for part, name, function in self.compiled:
                setattr(part, name, function)
                plain.callback(delattr, part, name)
            return self.model.objective(tokens, targets)


def shard_weights(model: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Shard the matrices of each block, and all else together: the embedding and the head may be tied.

    The matrices are gathered in `dtype`, in which autocast multiplies, and their gradients averaged in fp32. The rest
    stays in fp32: norms and scalars are small, and the embedding starts the residual stream. The parts are on `device`.
    Those of weights on the meta device are not initialized.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (distributed.world_size(),))
    in_blocks = {layer.weight for layer in model.layers.modules() if hasattr(layer, "role")}
    fully_shard(model, mesh=mesh, ignored_params=in_blocks)
    others = set(model.parameters()) - in_blocks
    precision = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)  # nor the stream
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=precision, ignored_params=others)
    # As `to_empty` does, but it would do so with all parameters.
    model._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    for method in ("objective", "loss", "next_logits"):
        register_fsdp_forward_method(model, method)


@contextmanager
def matrices_on_meta() -> Iterator[None]:
    """The matrices of a model made inside, which have a role, are on the meta device. Shard it, then draw or load them.

    All else has its initial values, also where it makes them itself, as imported norms do.
    """

    def to_meta(module: Any, name: str, weight: nn.Parameter) -> nn.Parameter | None:
        matrix = hasattr(module, "role") and name == "weight"
        return nn.Parameter(weight.to("meta")) if matrix and not weight.is_meta else None

    # Its type says that a hook returns nothing; its documentation, that it may return another parameter.
    with register_module_parameter_registration_hook(to_meta):  # type: ignore[arg-type]
        yield
