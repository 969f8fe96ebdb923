"""Estimated memory and speed of a training step on a GPU, without the GPU: `python bench.py plan`.

The step runs on fake tensors, which have shapes but no data. Memory is the peak of all storages that are alive; what
kernels allocate for themselves, fragmentation and the CUDA context come on top. Time is a roofline, a lower bound: an
operation takes as long as its data at the card's bandwidth, or as its matrix product at the card's peak.
"""

import weakref
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # private, but documented: "Fake tensor" in torch's manual
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import PRESETS, ModelConfig, TrainConfig, option
from experiments.benchmarks import Report, flops_per_token
from experiments.cards import BEFORE_AMPERE, CARDS
from files import require
from model import Llama
from optim import make_optimizers
from runtime.run import check_options, follow, read_config_file
from train import accumulate_gradients, update_weights

GIB = 2**30
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # saves for backward what flash attention saves on CUDA


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
    It gathers weights and gradients of the block it computes and of the next one, and the weights that are in no block.
    """
    rows = config.batch_size // ranks
    shape = min(config.micro_batch_size, rows), model_config.context
    micro_batches = rows // shape[0]
    passes = min(2, micro_batches)  # the others are like the second
    dtype = getattr(torch, config.dtype)
    limits = CARDS[card]
    peak_flops = limits.flops
    if dtype == torch.float32:  # with TF32, half of bfloat16's on all of these cards
        peak_flops = peak_flops / 2 if config.tf32 and card not in BEFORE_AMPERE else limits.float32
    sdpa = F.scaled_dot_product_attention
    with (
        # A CPU has flash attention as CUDA has, but without dropout.
        patch.object(F, "scaled_dot_product_attention", lambda *args, dropout_p, **options: sdpa(*args, **options)),
        FakeTensorMode(),
    ):
        model = Llama(model_config)
        model.recompute = config.recompute
        optimizers = make_optimizers(model, config)
        tokens, scaler = torch.zeros(shape, dtype=torch.int64), GradScaler("cpu", enabled=False)
        accumulate = partial(accumulate_gradients, model.objective, [(tokens, tokens)], 1, dtype, scaler)
        update = partial(update_weights, model, optimizers, config.lr, config.clip, scaler)
        accumulate()
        update()  # creates the optimizers' state
        weights = list(model.parameters())
        state = [optimizer.state for optimizer in optimizers]
        with Trace(weights, state, peak_flops, limits.bandwidth) as trace:
            for _ in range(passes):
                accumulate()
            seconds = trace.seconds + trace.unread()
            update()
        block = size(list(model.layers[0].parameters()))
    share = ranks if config.shard else 1
    # With Muon, every rank orthogonalizes whole matrices.
    updating = (trace.seconds + trace.unread() - seconds) / (share if config.optimizer == "adamw" else 1)
    parts = {
        "weights": size(weights) / share,
        "gradients": trace.gradients / (share if micro_batches == 1 else 1),
        "optimizer": size(state) / share,
        "gathered": size(weights) - model_config.layers * block + 4 * block if config.shard else 0,
        "activations": trace.peak - size(weights) - size(state) - trace.gradients,
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

    All operations between two matrix products count as one kernel, as an estimate of what torch.compile makes of them.
    It reads from memory what it did not compute itself, and writes what other kernels read.
    """

    def __init__(self, weights: list[Any], state: Any, peak_flops: float, bandwidth: float):
        super().__init__()
        self.weights, self.peak_flops, self.bandwidth = weights, peak_flops, bandwidth
        self.numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of the storages that are alive
        self.storages = self.live = self.peak = self.gradients = 0  # gradients: bytes at the peak
        self.seconds = 0.0
        self.in_kernel: set[int] = set()  # storages that the current kernel has read or written
        self.unwritten: dict[int, int] = {}  # bytes that a kernel has computed and no other has read
        self.sizes(tensors((weights, state)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        inputs, outputs = tensors((args, kwargs)), tensors(out)
        reads = self.sizes(inputs)
        arguments = zip(func._schema.arguments, args, strict=False)
        writes = self.sizes(tensors([value for argument, value in arguments if argument.is_write]))
        writes |= {number: bytes for number, bytes in self.sizes(outputs).items() if number not in reads}
        if not writes or name.startswith(("empty", "new_empty")):
            return out  # a view, or memory that nothing is computed for
        if name in ("embedding", "nll_loss_forward", "nll_loss_backward"):  # read what they write, not a whole table
            reads = {number: min(bytes, sum(writes.values())) for number, bytes in reads.items()}
        product = flops(name, inputs, outputs) / self.peak_flops
        alone = product or name == "embedding_dense_backward"  # a kernel of its own
        if alone:
            self.in_kernel.clear()
        new = reads.keys() - self.in_kernel
        late = sum(self.unwritten.pop(number, 0) for number in new)
        bytes = sum(reads[number] for number in new)
        if alone:
            bytes += sum(writes.values())
        else:
            self.in_kernel |= reads.keys() | writes.keys()
            self.unwritten |= writes
        self.seconds += max(product, bytes / self.bandwidth) + late / self.bandwidth
        return out

    def unread(self) -> float:
        """Seconds to write what a kernel has computed and that is still alive, such as gradients."""
        return sum(self.unwritten.get(number, 0) for number in self.numbers.values()) / self.bandwidth

    def sizes(self, tensors: list[Tensor]) -> dict[int, int]:
        """Bytes by storage. A new storage counts as alive until it is freed."""
        sizes = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self.numbers:
                self.storages += 1
                self.numbers[storage] = self.storages
                self.grow(storage.nbytes())
                weakref.finalize(storage, self.grow, -storage.nbytes())
            sizes[self.numbers[storage]] = min(tensor.nbytes, storage.nbytes())  # less if expanded
        return sizes

    def grow(self, bytes: int) -> None:
        self.live += bytes
        if self.live > self.peak:
            self.peak, self.gradients = self.live, size([weight.grad for weight in self.weights])


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(tree))


def flops(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """FLOPs of a matrix product or of causal attention, which computes half of all pairs; 0 for everything else."""
    if name.startswith(ATTENTION):
        forward = name == ATTENTION
        query = inputs[0 if forward else 1]  # B H T D
        return (2 if forward else 5) * query.numel() * query.shape[2]
    return 2 * outputs[0].numel() * inputs[-1].shape[-2] if name in ("mm", "addmm", "bmm", "baddbmm") else 0
