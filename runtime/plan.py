"""A training step on paper: its memory and, by a roofline, its time on a GPU, without the GPU.

with simulated() as trace:
    trainer = Trainer(run)  # on the device "cpu"; nothing is allocated
    trainer.update(1e-3)
print(trace.peak, eager_seconds(trace.launches, CARDS["H100"]))
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # private, but documented: "Fake tensor" in torch's manual
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.device import CARDS, Card

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # allocate, and launch nothing
LOOKUPS = {"embedding", "nll_loss_forward", "nll_loss_backward"}  # read as much as they write, not their whole table
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # saves for backward what flash attention saves on CUDA


@dataclass(frozen=True)
class Launch:
    """An operation that computes something: about one kernel on a GPU.

    reads, writes: bytes by storage; a storage is numbered when it is first seen.
    """

    name: str
    flops: float
    reads: dict[int, int]
    writes: dict[int, int]

    @property
    def fusible(self) -> bool:
        """Whether a compiler merges it with its neighbors: elementwise operations, reductions, copies."""
        return self.flops == 0 and self.name != "embedding_dense_backward"


@dataclass
class Trace(TorchDispatchMode):
    """Records every operation that computes something, and the bytes of all storages that are alive.

    Memory that a kernel allocates for itself is not seen.
    """

    live: int = 0
    peak: int = 0
    launches: list[Launch] = field(default_factory=list)
    at_peak: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        super().__init__()
        self.numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.storages = 0

    def start(self, at_peak: Callable[[], None] = lambda: None) -> None:
        """Forget the launches and the peak so far, but not what is alive. From now on, call `at_peak` at new peaks."""
        self.launches, self.peak, self.at_peak = [], self.live, at_peak
        at_peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "aten":
            return out
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        known = {self.number(tensor) for tensor in inputs}
        changed = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value)
            if isinstance(tensor, Tensor)
        ]
        written = changed + [tensor for tensor in outputs if self.number(tensor) not in known]
        name = func._overloadpacket.__name__
        if written and name not in FREE:
            writes = self.sizes(written)
            reads = self.sizes(inputs)
            if name in LOOKUPS:
                reads = {number: min(size, sum(writes.values())) for number, size in reads.items()}
            self.launches.append(Launch(name, flops(name, inputs, outputs), reads, writes))
        return out

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage. A new storage counts as alive until it is freed."""
        storage = tensor.untyped_storage()
        if storage not in self.numbers:
            self.storages += 1
            self.numbers[storage] = self.storages
            size = storage.nbytes()
            weakref.finalize(storage, self.freed, size)
            self.live += size
            if self.live > self.peak:
                self.peak = self.live
                self.at_peak()
        return self.numbers[storage]

    def alive(self) -> set[int]:
        """The numbers of the storages that are alive."""
        return set(self.numbers.values())

    def freed(self, size: int) -> None:
        self.live -= size

    def sizes(self, tensors: list[Tensor]) -> dict[int, int]:
        """Bytes by storage. Expanded tensors count once, and two views of a storage at most as all of it."""
        sizes: dict[int, int] = {}
        for tensor in tensors:
            number, most = self.number(tensor), tensor.untyped_storage().nbytes()
            sizes[number] = min(most, sizes.get(number, 0) + tensor.numel() * tensor.itemsize)
        return sizes


def flops(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """FLOPs of a matrix product or of causal attention, which computes half of all pairs; 0 for everything else."""
    if name in PRODUCTS:
        return 2 * outputs[0].numel() * inputs[-1].shape[-2]
    if name.startswith(ATTENTION):
        products = 5 if name.endswith("backward") else 2  # each query, heads × tokens × tokens × features of a head
        query = inputs[1] if name.endswith("backward") else inputs[0]  # B H T D
        return products * query.numel() * query.shape[2]
    return 0.0


@contextmanager
def simulated() -> Iterator[Trace]:
    """Tensors made inside have shapes and dtypes but no data. Yields the trace of what is computed with them.

    Use the device "cpu": attention is then the CPU's flash kernel, with dropout as well, which it does not support but
    CUDA's does.
    """
    attention = F.scaled_dot_product_attention

    def without_dropout(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
        return attention(*args, **kwargs)

    with (
        patch.object(nn.Module, "to", lambda module, *args, **kwargs: module),  # fails on fake parameters
        patch.object(F, "scaled_dot_product_attention", without_dropout),
        patch("optim.prefers_bfloat16", lambda device: True),  # as on a GPU, whatever this CPU prefers
        FakeTensorMode(allow_non_fake_inputs=True),
        Trace() as trace,
    ):
        yield trace


# --- time by a roofline ----------------------------------------------------------------------------------------------


def eager_seconds(launches: list[Launch], card: Card) -> float:
    """Time if each launch reads its inputs from memory and writes its outputs there, at the card's peak."""
    return sum(
        max(launch.flops / card.flops, moved(launch.reads, launch.writes) / card.bandwidth) for launch in launches
    )


def compiled_seconds(launches: list[Launch], alive: set[int], card: Card) -> float:
    """Time if all fusible launches between two others were one, an estimate of what torch.compile does.

    It reads what it did not compute itself and writes what others read later or what stays `alive`, once each. What
    backward reads is what eager autograd saves, of which a compiler recomputes a part instead.
    """
    return eager_seconds(fused(launches, alive), card)


def moved(reads: dict[int, int], writes: dict[int, int]) -> int:
    return sum(reads.values()) + sum(writes.values())


def fused(launches: list[Launch], alive: set[int]) -> list[Launch]:
    """The launches, with each run of fusible ones merged into one."""
    last_read = {number: index for index, launch in enumerate(launches) for number in launch.reads}
    merged: list[Launch] = []
    first = 0
    while first < len(launches):
        end = first + 1
        while launches[first].fusible and end < len(launches) and launches[end].fusible:
            end += 1
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for launch in launches[first:end]:
            for number, size in launch.reads.items():
                if number not in writes:
                    reads[number] = max(size, reads.get(number, 0))
            for number, size in launch.writes.items():
                writes[number] = max(size, writes.get(number, 0))
        kept = {n: size for n, size in writes.items() if n in alive or last_read.get(n, 0) >= end}
        merged.append(Launch(launches[first].name, launches[first].flops, reads, kept))
        first = end
    return merged


# --- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What one optimizer step takes. Memory is per rank, in bytes; time leaves out communication."""

    card: str
    ranks: int
    shard: bool
    recompute: bool
    parameters: int
    flops_per_token: float
    sequences: int  # of one step, over all ranks
    context: int
    micro_batch_size: int
    micro_batches: int  # of each rank
    weights: int
    gradients: int
    optimizer_state: int
    gathered: int  # weights and gradients of whole blocks, with `shard`
    activations: int  # and everything else that is alive at the peak
    launches: int  # of each rank, without torch.compile
    eager_seconds: float
    compiled_seconds: float

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.optimizer_state + self.gathered + self.activations

    def tokens_per_second(self, seconds: float) -> float:
        return self.sequences * self.context / seconds

    def mfu(self, seconds: float) -> float:
        """Model FLOPs utilization: recomputation does not count as work."""
        return self.tokens_per_second(seconds) * self.flops_per_token / (self.ranks * CARDS[self.card].flops)

    def __str__(self) -> str:
        card, gib = CARDS[self.card], 2**30
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer state": self.optimizer_state,
            "gathered blocks": self.gathered,
            "activations and the rest": self.activations,
        }
        listed = ", ".join(f"{name} {size / gib:.1f}" for name, size in parts.items() if size)
        lines = [
            f"{self.parameters:,} parameters, {self.flops_per_token:.3g} FLOPs per token",
            f"peak memory per rank, simulated: {self.memory / gib:.1f} GiB of {card.memory / gib:.1f} on {card.name}: "
            f"{listed}",
            f"a step: {self.sequences} sequences of {self.context} tokens; per rank {self.micro_batches} micro-batches "
            f"of {self.micro_batch_size}, {self.launches:,} launches without --compile",
        ]
        for name, seconds in (("without", self.eager_seconds), ("with", self.compiled_seconds)):
            lines.append(
                f"roofline {name} --compile: {seconds:.3g} s, {self.tokens_per_second(seconds):,.0f} tokens/s, "
                f"MFU {self.mfu(seconds):.1%}"
            )
        return "\n".join(
            [
                *lines,
                f"The roofline is an upper bound on speed: all data at {card.bandwidth / 1e12:.3g} TB/s, all matrix "
                f"products at {card.flops / 1e12:.0f} TFLOP/s, no communication.",
                "With --compile it is an estimate: everything between two matrix products counts as one kernel.",
            ]
        )


def make_plan(
    make_trainer: Callable[[], Any],
    flops_per_token: Callable[[Any], float],
    card: str,
    ranks: int,
    micro_batches: int,
    shard: bool,
) -> Plan:
    """The plan of a step of `micro_batches` on each rank. The trainer needs to run no more than two of them.

    With `shard`, a rank keeps its share of weights and optimizer state, and of the gradients, if it need not accumulate
    them: they are averaged in the last micro-batch only. For a while it has the whole weights and gradients of the
    block it computes and of the next one, and the weights that are in no block all the time.
    """
    at_peak = 0

    def note_gradients() -> None:
        nonlocal at_peak
        at_peak = sum(sizes[weight] for weight in trainer.weights if weight.grad is not None)

    with simulated() as trace:
        trainer = make_trainer()
        sizes = {weight: weight.numel() * weight.itemsize for weight in trainer.weights}
        rate = trainer.run.config.lr
        trainer.update(rate)  # creates the optimizer's state
        trace.start(note_gradients)
        trainer.update(rate)
        step, peak = trace.launches, trace.peak
        trace.start()
        trainer.accumulate_gradients()
        accumulation, alive = trace.launches, trace.alive()
        weights = sum(sizes.values())
        state = sum(
            value.numel() * value.itemsize
            for optimizer in trainer.optimizers
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        )
        block = sum(sizes[weight] for weight in trainer.model.layers[0].parameters())
    model, config = trainer.run.model_config, trainer.run.config
    outside = weights - model.layers * block
    repeats = micro_batches / (config.batch_size // config.micro_batch_size)
    share = ranks if shard else 1

    eager = eager_seconds(accumulation, CARDS[card])
    # Never compiled. With Muon, every rank orthogonalizes whole matrices.
    update = (eager_seconds(step, CARDS[card]) - eager) / (share if config.optimizer == "adamw" else 1)
    compiled = compiled_seconds(accumulation, alive, CARDS[card])
    return Plan(
        card=card,
        ranks=ranks,
        shard=shard,
        recompute=config.recompute,
        parameters=sum(weight.numel() for weight in trainer.weights),
        flops_per_token=flops_per_token(trainer.model),
        sequences=micro_batches * config.micro_batch_size * ranks,
        context=model.context,
        micro_batch_size=config.micro_batch_size,
        micro_batches=micro_batches,
        weights=weights // share,
        gradients=at_peak // (1 if micro_batches > 1 else share),
        optimizer_state=state // share,
        gathered=outside + 2 * 2 * block if shard and ranks > 1 else 0,
        activations=peak - weights - state - at_peak,
        launches=round(repeats * len(accumulation)) + len(step) - len(accumulation),
        eager_seconds=repeats * eager + update,
        compiled_seconds=repeats * compiled + update,
    )
