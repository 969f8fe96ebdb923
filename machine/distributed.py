"""Several ranks, the processes of `torchrun`: what they agree on, and tensors that are sharded over them.

Without torchrun there is no process group, and every function is a no-op or returns its input. Small values are
exchanged between the CPUs, so that no agreement waits for a GPU, gradients and weights between the devices.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from files import Ended, InUse, require

T = TypeVar("T")
PROCESSES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # how many a launcher started


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
        # The store still has the addresses of ranks before a restart. Several machines may count restarts differently.
        store = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cards else "gloo", store=store, rank=number, world_size=count)
    try:
        yield
    except BaseException as error:
        # NCCL waits for the other ranks, and they for this one, unless all have the error.
        if isinstance(error, Ended) or isinstance(error.__context__, Ended):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def rank() -> int:
    """The number of this process among all, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def world_size() -> int:
    """The number of ranks, 1 without torchrun."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def local_rank() -> int:
    """The rank among those of this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_main() -> bool:
    """Whether this process writes the run and talks to the user."""
    return rank() == 0


def check_device(device: torch.device) -> None:
    """Raise ValueError unless each rank can have a `device` of its own, and torchrun has started them if several."""
    if world_size() == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        several = any(os.environ.get(name, "1") != "1" for name in PROCESSES)
        how = "use torchrun --nproc-per-node N, see docs/gpu.md"
        require(not several, f"another launcher has started several processes, each of which would train alone; {how}")
    shared = device.index is not None or local_rank() >= torch.cuda.device_count()
    if world_size() > 1 and device.type != "cpu" and shared:
        raise ValueError(f"--device {device}: each rank needs its own GPU; use --device cuda with fewer ranks, or cpu")


def rows(batch_size: int) -> range:
    """The rows of the global batch that this rank trains on."""
    count = batch_size // world_size()
    return range(rank() * count, (rank() + 1) * count)


# --- agreement -------------------------------------------------------------------------------------------------------


def all_gather(x: T) -> list[T]:
    """`x` of each rank. It can be anything that pickle can store."""
    gathered = [x] * world_size()
    if world_size() > 1:
        dist.all_gather_object(gathered, x)
    return gathered


def all_reduce_mean(x: Tensor) -> Tensor:
    """The mean over the ranks, on the device."""
    if world_size() > 1:
        x = x / world_size()
        dist.all_reduce(x)
    return x


def all_reduce_max(*numbers: int) -> list[int]:
    """The largest of each of the `numbers` of all ranks. Unlike `all_gather` it does not pickle: fit for every step."""
    largest = torch.tensor(numbers)  # on the CPU
    if world_size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def torchrun_folders() -> list[str]:
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


# --- sharded tensors -------------------------------------------------------------------------------------------------


def full_tensor(x: Tensor) -> Tensor:
    """`x`, gathered from all ranks if it is sharded."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def local(x: Tensor) -> Tensor:
    """This rank's part of `x` if it is sharded, else `x`."""
    return x.to_local() if hasattr(x, "to_local") else x


def sharded_like(x: Tensor, example: Any) -> Tensor:
    """`x`, the same on every rank, sharded as the tensor `example` is. Each rank keeps its part; nothing is sent."""
    if not hasattr(example, "placements"):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(example.device), example.device_mesh, example.placements, src_data_rank=None)


def copy(target: Tensor, x: Tensor) -> None:
    """Copy `x`, the same on every rank, into `target`, which may be sharded."""
    target.copy_(sharded_like(x, target))


def on_whole_matrices(function: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    """`function` of a batch of matrices, N rows columns. If they are sharded, each rank gets some of them whole."""
    if not hasattr(batch, "placements"):
        return function(batch)
    from torch.distributed.tensor import Shard

    whole = batch.redistribute(placements=[Shard(0)])
    own = whole.to_local()
    own.copy_(function(own))
    return whole.redistribute(placements=batch.placements)
