"""Estimated memory and speed of a training step on a GPU, without the GPU: `python bench.py plan`.

The step runs on fake tensors, which have shapes but no data. Memory is the peak of all storages that are alive; what
kernels allocate for themselves, fragmentation and the CUDA context come on top. Time is a roofline, a lower bound: an
operation takes as long as its data at the card's bandwidth, or as its matrix product at the card's peak.
"""

import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # private, but documented: "Fake tensor" in torch's manual
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from config import PRESETS, ModelConfig, TrainConfig, option
from experiments.benchmarks import Report, Step, flops_per_token
from files import require
from model import Llama
from runtime.run import check_options, follow, read_config_file

GIB = 2**30
aten = torch.ops.aten
CAUSAL = {  # a CPU's attention, which saves for backward what CUDA's saves. Half of all pairs are computed.
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


class Card(NamedTuple):
    """What the data sheet of a GPU says.

    GeForce cards' FLOP/s follow from their float32, of which tensor cores do twice as many.
    """

    flops: float  # dense FLOP/s in bfloat16, or in float16 on a card without it, summed in float32
    float32: float  # FLOP/s without tensor cores
    bandwidth: float  # bytes/s from and to the device memory
    memory: float  # bytes


# The name of a card, and the fields of `Card`.
TABLE = """\
t4           65e12   8.1e12   320e9   16e9
v100        125e12  15.7e12   900e9   16e9
a10         125e12  31.2e12   600e9   24e9
a100        312e12  19.5e12  2039e9   80e9
h100        989e12    67e12  3350e9   80e9
h200        989e12    67e12  4800e9  141e9
b200       2250e12    75e12  7700e9  180e9
l4          121e12  30.3e12   300e9   24e9
l40s        362e12  91.6e12   864e9   48e9
rtx-3060   25.4e12  12.7e12   360e9   12e9
rtx-3080   59.5e12  29.8e12   760e9   10e9
rtx-3090     71e12  35.6e12   936e9   24e9
rtx-4060   30.2e12  15.1e12   272e9    8e9
rtx-4070   58.3e12  29.1e12   504e9   12e9
rtx-4080   97.5e12  48.7e12   717e9   16e9
rtx-4090    165e12  82.6e12  1008e9   24e9
rtx-5070   61.7e12  30.9e12   672e9   12e9
rtx-5080    113e12  56.3e12   960e9   16e9
rtx-5090    210e12   105e12  1792e9   32e9
"""
CARDS = {name: Card(*map(float, limits)) for name, *limits in map(str.split, TABLE.splitlines())}
BEFORE_AMPERE = ("t4", "v100")  # without bfloat16 and TF32


@dataclass(frozen=True)
class PlanConfig:
    """Options of `plan`, besides those of train.py."""

    card: str = option("h100", "GPU", choices=list(CARDS))
    ranks: int = option(1, "number of GPUs")


def read_models(options: PlanConfig, asked: dict[str, Any]) -> SimpleNamespace:
    """`options`, with the model that is asked for as of train.py or, if nothing is, every preset."""
    require(options.ranks >= 1, f"--ranks must be at least 1, not {options.ranks}")
    previous, plans = read_config_file(asked), {}
    for preset in [asked.get("preset", "small")] if asked else PRESETS:
        of_preset = asked if previous else {"preset": preset} | asked
        model, config = follow(of_preset, previous, memory=CARDS[options.card].memory)
        config = replace(config, shard=config.shard and (options.ranks > 1 or "shard" in asked))
        if config.dtype == "auto":
            older = "float32" if config.shard else "float16"
            config = replace(config, dtype=older if options.card in BEFORE_AMPERE else "bfloat16")
        check_options(model, config, options.ranks)
        plans[asked.get("config", preset)] = model, config, options.card, options.ranks
    return SimpleNamespace(**vars(options), plans=plans, device="cpu")


def bench_plan(config: SimpleNamespace, device: torch.device) -> Report:
    """Estimate memory and speed of a training step on a GPU, for every preset or for train.py's flags."""
    card = CARDS[config.card]
    return {
        "cards": f"{config.ranks} × {config.card.upper()}, {card.memory / GIB:.1f} GiB each",
        "memory": "GiB per rank at the peak, by simulation",
        "tokens/s, MFU": "a roofline, so upper bounds: compiled kernels at the card's limits, no communication",
        "rows": [{"model": name} | estimate(*plan) for name, plan in config.plans.items()],
    }


def estimate(model_config: ModelConfig, config: TrainConfig, card: str, ranks: int) -> dict[str, Any]:
    """What one optimizer step takes.

    With --shard, a rank keeps its share of weights and optimizer state, and of the gradients in its last micro-batch.
    It gathers weights and fp32 gradients of the block it computes and of the next one, and the weights in no
    block. Those of a block are gathered in the dtype of products, so autocast keeps no copies of them.
    """
    rows = config.batch_size // ranks
    config = replace(config, micro_batch_size=min(config.micro_batch_size, rows), compile=False)
    micro_batches = rows // config.micro_batch_size
    passes = min(2, micro_batches)  # the others are like the second
    limits = CARDS[card]
    dtype, peak_flops = torch.bfloat16, limits.flops  # float16 needs as much memory
    if config.dtype == "float32":  # TF32 reaches half of bfloat16's FLOP/s on all these cards
        dtype = torch.float32
        peak_flops = limits.flops / 2 if config.tf32 and card not in BEFORE_AMPERE else limits.float32
    sdpa = F.scaled_dot_product_attention
    with (
        # A CPU has flash attention as CUDA has, but without dropout.
        patch.object(F, "scaled_dot_product_attention", lambda *args, dropout_p, **options: sdpa(*args, **options)),
        FakeTensorMode(),
    ):
        model = Llama(model_config)
        step = Step(model, config, dtype)
        step()  # creates the optimizers' state
        weights, state = list(model.parameters()), [optimizer.state for optimizer in step.optimizers]
        with Trace(weights, state, peak_flops, limits.bandwidth) as trace:
            for _ in range(passes):
                step.accumulate()
            seconds = trace.seconds + trace.unread()
            step.update()
        block = total(list(model.layers[0].parameters()))
    share = ranks if config.shard else 1
    updating = (trace.seconds + trace.unread() - seconds) / share
    activations = trace.peak - total(weights) - total(state) - trace.gradients
    if config.shard and dtype == torch.bfloat16 and not config.recompute:  # with it, one block has them
        activations -= model_config.layers * block / 2  # copies by autocast, in the simulation
    gathered = 0.0
    if config.shard:
        outside = total(weights) - model_config.layers * block
        gathered = outside + 2 * block + 2 * block * dtype.itemsize / 4
    parts = {
        "weights": total(weights) / share,
        "gradients": trace.gradients / (share if micro_batches == 1 else 1),
        "optimizer": total(state) / share,
        "gathered": gathered,
        "activations": activations,
    }
    memory = sum(parts.values())
    speed = config.batch_size * model_config.context / (micro_batches / passes * seconds + updating)
    return {
        "parameters": sum(weight.numel() for weight in weights),
        "memory": memory / GIB,
        **{name: part / GIB for name, part in parts.items()},
        "fits": memory < limits.memory,
        "tokens/s": round(speed),
        "MFU": speed * flops_per_token(model) / (ranks * peak_flops),
    }


class Trace(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and the seconds of all operations by a roofline.

    All operations between two matrix products count as one kernel, as an estimate of what torch.compile makes
    of them. It reads from memory what it did not compute itself, and writes what other kernels read.
    """

    def __init__(self, weights: list[Any], state: Any, peak_flops: float, bandwidth: float):
        super().__init__()
        self.weights, self.peak_flops, self.bandwidth = weights, peak_flops, bandwidth
        self.alive: weakref.WeakSet = weakref.WeakSet()  # storages
        self.live = self.peak = self.gradients = 0  # bytes alive now, at the peak, and of gradients at the peak
        self.seconds = 0.0
        self.in_kernel: weakref.WeakSet = weakref.WeakSet()  # storages read or written by the current kernel
        self.unwritten: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # bytes not yet read by another kernel
        self.sizes((weights, state))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        name = operation.__name__
        reads = self.sizes((args, kwargs))
        arguments = zip(func._schema.arguments, args, strict=False)
        writes = self.sizes([value for argument, value in arguments if argument.is_write])
        writes |= {storage: size for storage, size in self.sizes(out).items() if storage not in reads}
        if not writes or name.startswith(("empty", "new_empty")):
            return out  # a view, or empty memory
        if name in ("embedding", "nll_loss_forward", "nll_loss_backward"):  # read what they write, not a whole table
            reads = {storage: min(size, sum(writes.values())) for storage, size in reads.items()}
        count_flops = flop_registry.get(CAUSAL.get(operation, operation), lambda *args, **kwargs: 0)
        product = count_flops(*args, **(kwargs or {}), out_val=out) / self.peak_flops
        if operation in CAUSAL:
            product /= 2
        alone = product or name == "embedding_dense_backward"  # a kernel of its own
        if alone:
            self.in_kernel.clear()
        new = reads.keys() - self.in_kernel
        late = sum(self.unwritten.pop(storage, 0) for storage in new)
        moved = sum(reads[storage] for storage in new)
        if alone:
            moved += sum(writes.values())
        else:
            self.in_kernel |= reads.keys() | writes.keys()
            self.unwritten |= writes
        self.seconds += max(product, moved / self.bandwidth) + late / self.bandwidth
        return out

    def unread(self) -> float:
        """Seconds to write what a kernel has computed and that is still alive, such as gradients."""
        return sum(self.unwritten.values()) / self.bandwidth

    def sizes(self, tree: Any) -> dict[torch.UntypedStorage, int]:
        """Bytes by storage. A new storage counts as alive until it is freed."""
        sizes = {}
        for tensor in tensors(tree):
            storage = tensor.untyped_storage()
            if storage not in self.alive:
                self.alive.add(storage)
                self.grow(storage.nbytes())
                weakref.finalize(storage, self.grow, -storage.nbytes())
            sizes[storage] = min(tensor.nbytes, storage.nbytes())  # less if expanded
        return sizes

    def grow(self, size: int) -> None:
        self.live += size
        if self.live > self.peak:
            self.peak, self.gradients = self.live, total([weight.grad for weight in self.weights])


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def total(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(tree))
