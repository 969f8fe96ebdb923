"""Speed of norms, training and generation, compared with PyTorch's own functions and the limits of the machine.

Every time is a median over rounds in which all candidates are timed in turn, because a shared machine can be slow for
minutes at a time. Ratios within one report are reliable; milliseconds of two reports cannot be compared.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from config import DEVICES, Asked, ModelConfig, TrainConfig, check_values, option
from machine.device import autocast, check_compile, peak_memory
from model import Llama
from norms import KINDS, TRAITS, build_norm
from optim import hidden_matrices
from roles import matrices
from runtime.acceleration import fast_decoder
from runtime.run import Run, read_config_file, resolve
from sampling import cast_matrices, generate
from train import Trainer

Call = Callable[[], Any]
Calls = dict[Any, Call]  # by what they measure
Report = dict[str, Any]  # the results of one command: "rows" with the same keys, and what these mean
PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192, "mps": 4096}  # rows of the matrices whose product bounds training
WARMUP_ROUNDS = 2


@dataclass(frozen=True)
class RoundsConfig:
    """Options of every measurement. Raises ValueError, in one line that names the flag, for bad values."""

    rounds: int = option(7, "number of measured rounds")

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class NormsConfig(RoundsConfig):
    device: str = option("auto", DEVICES, metavar="DEVICE")
    rows: int = option(8192, "number of tokens")
    dim: int = option(768, "features per token")
    compile: bool = option(False, "also measure RMSNorm and LayerNorm under torch.compile")


@dataclass(frozen=True)
class GenerateConfig(RoundsConfig):
    """Options of `generate`, besides those of train.py."""

    tokens: int = option(200, "tokens to generate after a prompt of one token, at most as many as the context holds")
    samples: int = option(8, "batch size to measure in addition to batch size 1")


def with_model(config: RoundsConfig, asked: Asked) -> SimpleNamespace:
    """The options in `config`, with the model and the training that are asked for as of train.py."""
    _, model, train, *_ = resolve({"compile": False} | asked, read_config_file(asked))
    dtype = getattr(torch, train.dtype)
    return SimpleNamespace(**vars(config), model=model, train=train, device=train.device, dtype=dtype)


def host_seconds(call: Call, device: torch.device) -> float:
    """Seconds of one call on the clock of this process."""
    synchronize = partial(torch.accelerator.synchronize, device) if device.type != "cpu" else lambda: None
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started


def gpu_seconds(call: Call, device: torch.device) -> float:
    """Seconds of one short call on a CUDA device, between two events.

    Before the first event the GPU fills memory, for about 1.3 ms on an H200. Meanwhile the CPU launches the kernels of
    the call, so launching them is not timed. The filling also replaces what is in the cache.
    """
    filled = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(20):
            filled.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def time_alternately(
    calls: Calls, rounds: int, device: torch.device, measure: Callable = host_seconds
) -> dict[Any, float]:
    """Median seconds of each call, over rounds that make each call once."""
    seconds = {name: list[float]() for name in calls}
    for _ in range(WARMUP_ROUNDS + rounds):
        for name, call in calls.items():
            seconds[name].append(measure(call, device))
    return {name: statistics.median(measured[WARMUP_ROUNDS:]) for name, measured in seconds.items()}


def bench_norms(config: NormsConfig, device: torch.device) -> Report:
    """Measure every norm compared with F.layer_norm, F.rms_norm and a copy: forward, and forward plus backward."""
    report: Report = {
        "shape": f"{config.rows} tokens of {config.dim} features",
        "ratio": "time relative to F.layer_norm; above 1 is slower",
        "fraction": "of a copy's speed, counting the bytes that must be read and written",
        "both": "forward plus backward",
        "rows": [],
    }
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        x = torch.randn(config.rows, config.dim, device=device, dtype=dtype, requires_grad=True)
        grad_y = torch.randn_like(x)
        norms = make_norms(config.dim, device, dtype, config.compile)
        measure = gpu_seconds if device.type == "cuda" else host_seconds
        calls: Calls = {"copy": x.detach().clone}
        for norm, module in norms.items():
            calls[f"{norm} forward"] = partial(module, x)
            calls[f"{norm} both"] = partial(forward_backward, module, x, grad_y)
        seconds = time_alternately(calls, config.rounds, device, measure)
        report[f"copy in {name}, GB/s"] = 2 * x.nbytes / seconds["copy"] / 1e9
        for norm in norms:
            row: Report = {"norm": norm, "dtype": name}
            # Forward reads x and writes y, as a copy does. Backward reads x and grad_y and writes grad_x: 1.5 copies.
            for part, copies in (("forward", 1.0), ("both", 2.5)):
                measured = seconds[f"{norm} {part}"]
                row[f"{part} ms"] = 1e3 * measured
                row[f"{part} ratio"] = measured / seconds[f"F.layer_norm {part}"]
                row[f"{part} fraction"] = copies * seconds["copy"] / measured
            report["rows"].append(row)
    return report


def make_norms(dim: int, device: torch.device, dtype: torch.dtype, compiled: bool) -> dict[str, nn.Module]:
    """Every kind that can have this width, with parameters in fp32 as in training, and PyTorch's own norms."""
    norms = {}
    for kind in KINDS:
        if not TRAITS[kind].identity:
            with suppress(ValueError):
                norms[kind] = build_norm(kind, dim)
    if compiled:
        check_compile(device)
        for kind in ("rmsnorm", "layernorm"):  # PyTorch has kernels for both
            norm = build_norm(kind, dim)
            norm.compile()
            norms[f"{kind}, compiled"] = norm
    norms["F.layer_norm"] = nn.LayerNorm(dim, dtype=dtype if device.type == "cuda" else None)  # as CUDA's kernel needs
    norms["F.rms_norm"] = nn.RMSNorm(dim, dtype=dtype)  # its kernel needs the dtype of x
    return {name: norm.to(device) for name, norm in norms.items()}


def forward_backward(norm: nn.Module, x: Tensor, grad_y: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x and of all parameters."""
    return torch.autograd.grad(norm(x), [x, *norm.parameters()], grad_y)


def bench_train(config: SimpleNamespace, device: torch.device) -> Report:
    """Measure a training step of one micro-batch, compared with the speed of matrix products alone."""
    before = peak_memory(device)
    step = make_step(config.model, replace(config.train, batch_size=config.train.micro_batch_size))
    # With --compile, the first step compiles. The second has the optimizers' state from its start.
    step()
    step()
    memory = peak_memory(device) - before
    size = PRODUCT_SIZE[device.type]
    matrix = torch.randn(size, size, device=device, dtype=config.dtype)
    calls: Calls = {"step": step, "product": partial(torch.mm, matrix, matrix)}
    seconds = time_alternately(calls, config.rounds, device)
    product = 2 * size**3 / seconds["product"]  # FLOP/s
    speed = config.train.micro_batch_size * config.model.context / seconds["step"]
    # The step keeps its model to itself. One without storage is enough to count.
    with torch.device("meta"):
        bound = product / flops_per_token(Llama(config.model))
    return {
        "dtype": str(config.dtype),
        "upper bound": f"tokens/s if all matrix products ran at {product / 1e12:.3g} TFLOP/s, as large ones do",
        "fraction": "of that upper bound",
        "rows": [
            {
                "tokens/s": round(speed),
                "upper bound": round(bound),
                "fraction": speed / bound,
                "memory, MB": memory / 1e6,
            }
        ],
    }


def make_step(model: ModelConfig, config: TrainConfig) -> Call:
    """A training step of train.py, on the same random tokens every time.

    It is a step of the trainer itself, at the peak of the learning rate: compiled as a run is, divided into the same
    micro-batches, clipped. It does not read the loss, which a run does every ten steps, and `--watch` is off.
    """
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    config = replace(config, watch=0)
    trainer = Trainer(Run(Path(), {}, model, config, None, []))  # type: ignore[arg-type]  # there is no text
    tokens = torch.randint(model.vocab_size, (config.batch_size, model.context), device=config.device)
    return partial(trainer.update, tokens, tokens, config.lr)


def flops_per_token(model: Llama) -> float:
    """FLOPs of forward and backward: 6 for each weight in a matrix product, plus causal attention."""
    config = model.config
    products = config.vocab_size * config.dim + sum(weight.numel() for weight in hidden_matrices(model))
    return 6 * products + 6 * config.layers * config.heads * config.head_dim * config.context


def bench_generate(config: SimpleNamespace, device: torch.device) -> Report:
    """Measure greedy generation: plain, with fast/, and with --compile, compared with reading the weights per token."""
    tokens = min(config.tokens, config.model.context - 1)
    with torch.device("meta"):
        size = config.dtype.itemsize * sum(weight.numel() for _, _, weight in matrices(Llama(config.model)))
    vectors = torch.randn(2, size // 2 // 4, device=device)  # together as large as the weights; may stay in cache, too
    calls: Calls = {"reading": partial(torch.dot, *vectors)}
    names = ["plain", "fast"] if device.type == "cpu" else ["plain"]
    if config.train.compile:
        names.append("compiled")
    for name in names:
        model = Llama(config.model).to(device).eval()
        cast_matrices(model, config.dtype)
        decoder, _ = fast_decoder(model, config.samples, name == "fast", name == "compiled")
        if decoder is model and name != "plain":
            continue  # it cannot be used
        for samples in sorted({1, config.samples}):
            prompts = torch.zeros(samples, 1, dtype=torch.int64)
            calls[name, samples] = partial(generate, model, prompts, decoder=decoder, tokens=tokens, temperature=0)
    with autocast(device, config.dtype, cache=True):
        seconds = time_alternately(calls, config.rounds, device)
    reading = seconds.pop("reading")
    rows = []
    for (name, samples), measured in seconds.items():
        speed, bound = samples * tokens / measured, samples / reading
        rows.append(
            {
                "model": name,
                "samples": samples,
                "tokens/s": round(speed),
                "upper bound": round(bound),
                "fraction": speed / bound,
            }
        )
    return {
        "dtype": str(config.dtype),
        "upper bound": "tokens/s if a token took as long as torch.dot takes to read as many bytes as the weights have",
        "fraction": "of that upper bound",
        "rows": rows,
    }
