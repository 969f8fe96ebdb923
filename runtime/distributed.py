"""Training on several ranks, the processes of `torchrun`: what they agree on, and a model they train together.

In one process there is no process group, and every function here does what one process does.
Small values go between the CPUs, over Gloo, so no agreement waits for a GPU. Gradients and weights go between the
devices, over Gloo or NCCL.
"""

import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model import Llama

T = TypeVar("T")
TORCHRUN_NOTICES = 3  # seconds; it looks every 0.1 s
# A thread of Gloo that frees its last tensor while Python shuts down seems to be what has aborted a rank on a busy
# machine. It needs some microseconds.
GLOO_ENDS = 0.2  # seconds


# --- the process group -----------------------------------------------------------------------------------------------


@contextmanager
def process_group() -> Iterator[None]:
    """Join the ranks that torchrun started, if there are several. On a GPU, rank k of a machine uses card k."""
    launched = dist.is_available() and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1
    if not launched or dist.is_initialized():
        yield
        return
    cards = torch.cuda.device_count()
    if local_rank() < cards:
        torch.cuda.set_device(local_rank())
    store, _, _ = next(dist.rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # After a restart, torchrun's store still has the addresses of the ranks that are gone. Only on one machine do
        # all ranks know how many restarts there were.
        store = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "cpu:gloo,cuda:nccl" if cards else "gloo"
    dist.init_process_group(
        backend, store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        # Another rank is gone. torchrun reports the rank that it sees end first, and ends the others: wait, so that it
        # reports the one with the cause.
        time.sleep(TORCHRUN_NOTICES)
        raise
    except SystemExit:
        time.sleep(GLOO_ENDS)
        raise
    dist.destroy_process_group()
    time.sleep(GLOO_ENDS)


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def local_rank() -> int:
    """The rank among those of this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_main() -> bool:
    """Whether this process writes the run and talks to the user."""
    return rank() == 0


def restarted() -> bool:
    """Whether torchrun has started the ranks again after one failed. Only some machines may have counted that."""
    return all_reduce_max(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))) > 0


def launch() -> str | None:
    """The id of torchrun's job, which a restart keeps. None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def may_restart() -> bool:
    """Whether torchrun has --max-restarts."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


# --- agreement -------------------------------------------------------------------------------------------------------


@contextmanager
def raise_on_all_ranks(*kinds: type[Exception]) -> Iterator[None]:
    """A ValueError or OSError inside, or an error of `kinds`, on any rank, is raised on all.

    Nothing inside may wait for other ranks.
    """
    if world_size() == 1:
        yield
        return
    error: Exception | None = None
    shared: tuple[type[Exception], ...] = (ValueError, OSError, *kinds)
    try:
        yield
    except shared as caught:
        error = caught
    errors: list[Any] = [None] * world_size()
    dist.all_gather_object(errors, error and (type(error), str(error), getattr(error, "errno", None)))
    for kind, message, number in filter(None, errors):
        shared_error = (ValueError if issubclass(kind, ValueError) else kind)(message)
        if isinstance(shared_error, OSError):
            shared_error.errno = number  # the exit code depends on it
        raise shared_error from error


def from_main(function: Callable[..., T], *arguments: Any) -> T:
    """The result of `function` on rank 0. Its ValueError or OSError is raised on all ranks."""
    result: list[Any] = [None]
    with raise_on_all_ranks():
        if is_main():
            result[0] = function(*arguments)
    if world_size() > 1:
        dist.broadcast_object_list(result)
    return result[0]


@contextmanager
def held_by_main(resource: AbstractContextManager, *kinds: type[Exception]) -> Iterator[None]:
    """Enter `resource` on rank 0 only. Its errors are raised on all ranks, as in `raise_on_all_ranks`."""
    with ExitStack() as stack:
        with raise_on_all_ranks(*kinds):
            if is_main():
                stack.enter_context(resource)
        yield


@contextmanager
def printed_by_main() -> Iterator[None]:
    """Only rank 0 prints what every rank would print, and if that is the end, all leave together."""
    with ExitStack() as stack:
        if not is_main():
            null = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(null))
            stack.enter_context(redirect_stderr(null))
        try:
            yield
        except SystemExit:
            barrier()
            raise


def barrier() -> None:
    all_reduce_max(0)


def all_reduce_max(number: int) -> int:
    """The maximum over the ranks."""
    if world_size() == 1:
        return number
    numbers = torch.tensor(number)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return int(numbers)


def totals(*numbers: float) -> list[float]:
    """The sum over the ranks of each number."""
    if world_size() == 1:
        return list(numbers)
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def mean(x: Tensor) -> Tensor:
    """The mean over the ranks, on the device."""
    if world_size() == 1:
        return x
    x = x / world_size()
    dist.all_reduce(x)
    return x


# --- what each rank gets ---------------------------------------------------------------------------------------------


def check_device(device: torch.device) -> None:
    """Raise ValueError unless each rank can have a `device` of its own."""
    if world_size() > 1 and device.type == "mps":
        raise ValueError("--device mps trains on one rank; use --device cpu")
    if world_size() > 1 and device.index is not None:
        raise ValueError(f"--device {device} is one GPU for all ranks; use --device cuda, and each has its own")
    if device.type == "cuda" and local_rank() >= torch.cuda.device_count() > 0 and world_size() > 1:
        raise ValueError(
            f"--device cuda: torchrun starts more ranks than the {torch.cuda.device_count()} GPUs of a machine; "
            "lower --nproc-per-node"
        )


def check_batch(batch_size: int, micro_batch_size: int, ranks: int) -> None:
    """Raise ValueError unless the batch divides among the ranks, and a rank's share into micro-batches."""
    share = batch_size // ranks
    if batch_size % ranks:
        raise ValueError(f"--batch-size {batch_size} is not divisible by the number of ranks, {ranks}")
    if share % min(share, micro_batch_size):
        raise ValueError(
            f"--micro-batch-size {micro_batch_size} does not divide the {share} sequences of each of {ranks} ranks"
        )


def resolve_shard(wanted: bool, by_flag: bool, dtype: str, ranks: int) -> bool:
    """Whether to shard: as `wanted`, with several ranks. A sharded run may be resumed in one process.

    Raises ValueError if the user has asked for it and it is not possible.
    """
    if by_flag and ranks == 1:
        raise ValueError("--shard needs several ranks: torchrun --nproc-per-node, or --ranks for --plan")
    if wanted and ranks > 1 and dtype == "float16":
        raise ValueError("--shard needs --dtype float32 or bfloat16: float16's loss scale is not the same on all ranks")
    return wanted and ranks > 1


def rows(batch_size: int) -> range:
    """The rows of the global batch that this rank trains on."""
    share = batch_size // world_size()
    return range(rank() * share, (rank() + 1) * share)


def seed(of_step: int) -> int:
    """The seed of this rank's random numbers in a step. Rank 0 has that of a single process."""
    return of_step + (rank() << 48)


def shares(batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """This rank's part of `batches`, and whether each counts.

    Every rank gets equally many, because the forward pass of a sharded model needs them all: a rank that has run out
    gets one that another rank counts.
    """
    remaining = iter(batches)
    while group := list(islice(remaining, world_size())):
        mine = rank() < len(group)
        yield group[rank() if mine else 0], mine


# --- the parallel model ----------------------------------------------------------------------------------------------


class Parallel:
    """The loss of `model` with gradients that are averages over the ranks. In one process, simply `model.loss`.

    By default every rank holds the whole model (DDP). With `shard`, each holds its part of every weight, gradient and
    optimizer state, and gathers the weights of a block when it needs them (FSDP2).

    Call `loss`, not `model.loss`: DDP synchronizes only what goes through its own forward.
    """

    def __init__(self, model: Llama, shard: bool):
        self.model, self.shard = model, shard
        self.loss: Callable[[Tensor, Tensor], Tensor] = model.loss
        if world_size() > 1 and shard:
            shard_weights(model)
            self.loss = model.loss  # now with the hooks that gather the weights
        elif world_size() > 1:
            # Buffers need no copying: rotary tables never change, and norms with running statistics are refused.
            parameters = inspect.signature(DistributedDataParallel.__init__).parameters
            copies = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
            options: dict[str, Any] = {copies: False, "gradient_as_bucket_view": True}
            self.loss = DistributedDataParallel(Loss(model), **options)

    def micro_batches(self, batches: list[T]) -> Iterator[T]:
        """`batches`. Gradients are averaged in the last backward pass only, over what all have accumulated."""
        with self.without_averaging():
            yield from batches[:-1]
        yield batches[-1]

    @contextmanager
    def without_averaging(self) -> Iterator[None]:
        sharded = self.shard and world_size() > 1
        with self.loss.no_sync() if isinstance(self.loss, DistributedDataParallel) else nullcontext():
            if sharded:
                self.model.set_requires_gradient_sync(False)  # type: ignore[operator]
            yield
        if sharded:
            self.model.set_requires_gradient_sync(True)  # type: ignore[operator]


class Loss(nn.Module):
    """The loss as a forward pass, which is what DDP wraps."""

    def __init__(self, model: Llama):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets)


def shard_weights(model: Llama) -> None:
    """Shard each block, and the rest together: a tied embedding and head must be gathered at the same time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(model.embed_tokens.weight.device.type, (world_size(),))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in ("loss", "next_logits"):
        register_fsdp_forward_method(model, method)


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
