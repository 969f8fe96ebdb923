"""Training on several ranks, the processes of `torchrun`: what they agree on, and a model they train together.

Without torchrun there is no process group, and every function is a no-op or returns its input.
Small values are exchanged between the CPUs, over Gloo, so that no agreement waits for a GPU. Gradients and weights are
exchanged between the devices, over NCCL or Gloo.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel

from files import InUse

T = TypeVar("T")


# --- the process group -----------------------------------------------------------------------------------------------


@contextmanager
def process_group() -> Iterator[None]:
    """Join the ranks that torchrun started, if there are several. On a GPU, rank k of a machine uses card k."""
    launched = dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized()
    if not launched or os.environ["WORLD_SIZE"] == "1":
        yield
        return
    cards = torch.cuda.device_count()
    if local_rank() < cards:
        torch.cuda.set_device(local_rank())
    store, number, count = next(dist.rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # After a restart, torchrun's store still has the addresses of the ranks that are gone. On several machines the
        # number of restarts may differ.
        store = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "cpu:gloo,cuda:nccl" if cards else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def local_rank() -> int:
    """The rank among those of this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_main() -> bool:
    """Whether this process writes the run and talks to the user."""
    return rank() == 0


# --- agreement -------------------------------------------------------------------------------------------------------


def all_gather(x: T) -> list[T]:
    """`x` of each rank. It can be anything that pickle can store."""
    gathered = [x] * world_size()
    if world_size() > 1:
        dist.all_gather_object(gathered, x)
    return gathered


def all_reduce_mean(x: Tensor) -> Tensor:
    """The mean over the ranks, on the device."""
    if world_size() == 1:
        return x
    x = x / world_size()
    dist.all_reduce(x)
    return x


def all_reduce_max(number: int) -> int:
    """The largest `number` of any rank. Cheaper than `all_gather`, which pickles, and so fit for every step."""
    largest = torch.tensor(number)  # on the CPU
    if world_size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def launch() -> list[str]:
    """The temporary folder of each machine's torchrun, which restarts keep. An --rdzv-id may be used twice."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # FOLDER/attempt_0/RANK/error.json
    return all_gather(f"{socket.gethostname()}:{Path(file).parents[2]}") if file else []


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise a ValueError, OSError or InUse of any rank on all ranks. Nothing inside may wait for other ranks."""
    error = None
    try:
        yield
    except (ValueError, OSError, InUse) as caught:
        error = caught
    for shared in all_gather(error):
        if shared:
            raise error or shared  # the copy of an OSError has lost its errno


def from_main(function: Callable[..., T], *arguments: Any) -> T:
    """The result of `function` on rank 0. Its errors are raised on all ranks, as in `raise_on_all_ranks`."""
    result: Any = None
    with raise_on_all_ranks():
        if is_main():
            result = function(*arguments)
    return all_gather(result)[0]


# --- what each rank gets ---------------------------------------------------------------------------------------------


def check_device(device: torch.device) -> None:
    """Raise ValueError unless each rank can have a `device` of its own."""
    shared = device.index is not None or local_rank() >= torch.cuda.device_count()
    if world_size() > 1 and device.type != "cpu" and shared:
        raise ValueError(f"--device {device}: each rank needs its own GPU; use --device cuda with fewer ranks, or cpu")


def rows(batch_size: int) -> range:
    """The rows of the global batch that this rank trains on."""
    count = batch_size // world_size()
    return range(rank() * count, (rank() + 1) * count)


# --- the parallel model ----------------------------------------------------------------------------------------------


class Parallel:
    """The objective of `model` with gradients averaged over the ranks. In one process, simply `model.objective`.

    By default every rank holds the whole model (DDP). With `shard`, each holds its part of every tensor and gathers
    the weights of a block, its matrices in `dtype`, when it needs them (FSDP2).
    """

    def __init__(self, model: Any, shard: bool, device: torch.device, dtype: torch.dtype = torch.float32):
        self.model, self.shard = model, shard
        if shard:
            shard_weights(model, device, dtype)  # adds hooks to `model.objective`
        self.objective: Callable[[Tensor, Tensor], dict[str, Tensor]] = model.objective
        if world_size() > 1 and not shard:
            # Rotary tables never change, and norms with running statistics are refused.
            self.objective = DistributedDataParallel(Objective(model), gradient_as_bucket_view=True)
            self.objective.broadcast_buffers = False  # the argument is deprecated, and older versions have no other

    def micro_batches(self, batches: list[T]) -> Iterator[T]:
        """`batches`. Gradients are averaged in the last backward pass only, over what all have accumulated."""
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            if self.shard:
                self.model.set_requires_gradient_sync(last)
            replicated = isinstance(self.objective, DistributedDataParallel)
            with self.objective.no_sync() if replicated and not last else nullcontext():  # type: ignore[attr-defined]
                yield batch


class Objective(nn.Module):
    """The objective as the forward pass of a module, for DDP."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return self.model.objective(tokens, targets)


def shard_weights(model: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Shard the matrices of each block, and all else together: the embedding and the head may be tied.

    The matrices are gathered in `dtype`, in which autocast multiplies, and their gradients averaged in fp32.
    The rest stays in fp32: norms and scalars are small, and the embedding starts the residual stream.

    The parts are on `device`. Those of weights on the meta device are not initialized.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (world_size(),))
    in_blocks = {layer.weight for layer in model.layers.modules() if hasattr(layer, "role")}
    fully_shard(model, mesh=mesh, ignored_params=in_blocks)
    others = set(model.parameters()) - in_blocks
    precision = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the stream is not a matrix either
    )
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


def full_tensor(x: Tensor) -> Tensor:
    """`x`, gathered from all ranks if it is sharded."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def local(x: Tensor) -> Tensor:
    """This rank's part of `x` if it is sharded, else `x`."""
    return x.to_local() if hasattr(x, "to_local") else x


def sharded_like(x: Tensor, example: Tensor) -> Tensor:
    """`x`, the same on every rank, sharded as `example` is. Each rank keeps its part; nothing is sent."""
    if not hasattr(example, "placements"):
        return x
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(example, DTensor)
    return distribute_tensor(x.to(example.device), example.device_mesh, example.placements, src_data_rank=None)


def copy(target: Tensor, x: Tensor) -> None:
    """Copy `x`, the same on every rank, into `target`, which may be sharded."""
    target.copy_(sharded_like(x, target))


def on_whole_matrices(function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """`function` of a batch of matrices, N rows columns.

    If they are sharded, the ranks exchange their parts, so that each has some of the matrices whole, and back.
    """
    if not hasattr(batch, "placements"):
        return function(batch)
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(batch, DTensor)
    whole = batch.redistribute(placements=[Shard(0)])
    own = whole.to_local()
    own.copy_(function(own))
    return whole.redistribute(placements=batch.placements)
