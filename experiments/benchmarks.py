"""Speed of norms, training and generation, compared with PyTorch's own functions and the limits of the machine.

Every time is a median over rounds in which all candidates are timed in turn, because a shared machine can be slow for
minutes at a time. Ratios within one report are reliable; milliseconds of two reports cannot be compared.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from config import DEVICES, ModelConfig, TrainConfig, check_sizes, option, require
from generate import Sampling, cast_matrices, stream_ids
from model import Llama
from norms import KINDS, TRAITS, build_norm
from optim import make_optimizers
from runtime.acceleration import accelerate, resolve_fast, unavailable
from runtime.device import autocast, peak_memory
from train import flops_per_token

Call = Callable[[], Any]
Report = dict[str, Any]  # the results of one command: "rows", which all have the same keys, and what they mean
PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192, "mps": 4096}  # of the square matrices whose product bounds training speed
WARMUP_ROUNDS = 2
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COMPILED_NORMS = ("rmsnorm", "layernorm")  # those that PyTorch has a kernel for


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Options of every measurement. Raises ValueError, in one line that names the flag, for bad values."""

    rounds: int = option(7, "measured rounds")
    device: str = option("auto", DEVICES, metavar="DEVICE")
    out: str = option("", "JSON file for the report (default: bench-COMMAND.json under runs/)", metavar="FILE")

    def __post_init__(self) -> None:
        check_sizes(self, "rounds")


@dataclass(frozen=True, kw_only=True)
class NormsConfig(BenchConfig):
    """Options of `norms`."""

    rows: int = option(8192, "number of tokens")
    dim: int = option(768, "features per token")
    compile: bool = option(False, "also measure RMSNorm and LayerNorm under torch.compile")
    rounds: int = option(15, "measured rounds")

    def __post_init__(self) -> None:
        check_sizes(self, "rows", "dim", "rounds")
        try:
            with torch.device("meta"):  # allocates nothing; only checks the width
                for kind in KINDS:
                    build_norm(kind, self.dim)
        except ValueError as error:
            raise ValueError(f"--dim {self.dim}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class RandomModelConfig(BenchConfig):
    """The shape of a model with random weights."""

    dim: int = option(288, "width of the residual stream")
    layers: int = option(6, "number of blocks")
    heads: int = option(6, "attention heads")
    hidden_dim: int = option(768, "width of the MLP's hidden layer")
    vocab_size: int = option(32000, "number of token ids")
    context: int = option(256, "maximum sequence length in tokens")
    dtype: str = option(
        "all", "dtype to measure; all is float32, and bfloat16 if the device has it", choices=["all", *DTYPES]
    )

    def model_config(self) -> ModelConfig:
        names = ("dim", "layers", "heads", "hidden_dim", "vocab_size", "context")
        return ModelConfig(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class StepConfig(RandomModelConfig):
    """Options of `train`: the shape of a training step."""

    batch_size: int = option(8, "sequences per step")
    optimizer: str = option("adamw", "as in train.py", choices=["adamw", "muon"])
    compile: bool = option(False, "use torch.compile; measures the plain model only")
    recompute: bool = option(False, "gradient checkpointing")

    def __post_init__(self) -> None:
        check_sizes(self, "batch_size", "rounds")
        self.model_config()


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(RandomModelConfig):
    """Options of `generate`."""

    tokens: int = option(200, "tokens to generate after a prompt of one token")
    samples: int = option(8, "batch size to measure in addition to batch size 1")

    def __post_init__(self) -> None:
        check_sizes(self, "tokens", "samples", "rounds")
        require(self.tokens < self.context, f"--tokens {self.tokens} must be below --context {self.context}")
        self.model_config()


# --- timing ----------------------------------------------------------------------------------------------------------


def time_alternately(calls: dict[str, Call], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each call, over rounds that make each call once."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARMUP_ROUNDS + rounds):
        for name, call in calls.items():
            synchronize(device)
            started = time.perf_counter()
            call()
            synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(measured[WARMUP_ROUNDS:]) for name, measured in seconds.items()}


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def model_dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.bfloat16, torch.float32]


def measured_dtypes(config: RandomModelConfig, device: torch.device) -> list[torch.dtype]:
    return model_dtypes(device) if config.dtype == "all" else [DTYPES[config.dtype]]


def variants(fast: bool) -> dict[str, bool]:
    """Names of the variants to measure, and whether each is accelerated."""
    return {"plain": False, "fast": True} if fast else {"plain": False}


def fast_status(fast: bool) -> str:
    """Whether the kernels of `fast/` are measured, for the report.

    `accelerate` sets the memory allocator of the whole process, so the plain model gains from that part of it as well.
    """
    if not fast:
        return f"not measured: {unavailable() or 'needs --device cpu and no --compile'}"
    return "measured; its memory allocation applies to all rows"


def format_settings(config: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items() if value and name != "out")


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- norms -----------------------------------------------------------------------------------------------------------


def bench_norms(config: NormsConfig, device: torch.device) -> Report:
    """Measure every norm compared with F.layer_norm, F.rms_norm and a copy: forward, and forward plus backward."""
    fast = resolve_fast(None, device)
    report: Report = {
        "fast": fast_status(fast),
        "tokens": config.rows,
        "features": config.dim,
        "ratio": "time relative to F.layer_norm; above 1 is slower",
        "fraction": "of a copy's speed, counting the bytes that must be read and written",
        "both": "forward plus backward",
        "rows": [],
    }
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(config.rows, config.dim, device=device, dtype=dtype, requires_grad=True)
        grad_y, norms = torch.randn_like(x), make_norms(config.dim, device, dtype, fast, config.compile)
        calls: dict[str, Call] = {"copy": x.detach().clone}
        for name, norm in norms.items():
            calls[f"{name} forward"] = partial(norm, x)
            calls[f"{name} both"] = partial(forward_backward, norm, x, grad_y)
        seconds = time_alternately(calls, config.rounds, device)
        report[f"copy in {short_name(dtype)}, GB/s"] = 2 * x.nbytes / seconds["copy"] / 1e9
        for name in norms:
            row: dict[str, Any] = {"norm": name, "dtype": short_name(dtype)}
            # Forward reads x and writes y, as a copy does. Backward reads x and grad_y and writes grad_x: 1.5 copies.
            for part, copies in (("forward", 1.0), ("both", 2.5)):
                measured = seconds[f"{name} {part}"]
                row[f"{part} ms"] = 1e3 * measured
                row[f"{part} ratio"] = measured / seconds[f"F.layer_norm {part}"]
                row[f"{part} fraction"] = copies * seconds["copy"] / measured
            report["rows"].append(row)
    return report


def make_norms(
    dim: int, device: torch.device, dtype: torch.dtype, fast: bool, compiled: bool = False
) -> dict[str, nn.Module]:
    """Every kind, with parameters in fp32 as in training, and PyTorch's own norms.

    If `fast`, kinds that `accelerate` changes are included a second time, accelerated; if `compiled`,
    `COMPILED_NORMS`, compiled.
    """
    norms: dict[str, nn.Module] = {}
    for kind in sorted(kind for kind in KINDS if not TRAITS[kind].identity):
        norms[kind] = build_norm(kind, dim)
        if fast and type(accelerated := accelerate(build_norm(kind, dim))) is not KINDS[kind]:
            norms[f"{kind}, fast"] = accelerated
    if compiled:
        norms |= {f"{kind}, compiled": compile_norm(kind, dim) for kind in COMPILED_NORMS}
    norms["F.layer_norm"] = TorchNorm(F.layer_norm, dim, bias=True)
    norms["F.rms_norm"] = TorchNorm(F.rms_norm, dim, bias=False)
    if dtype != torch.float32:  # PyTorch's kernel for F.rms_norm needs parameters in the dtype of x
        norms["F.rms_norm"].to(dtype)
        norms["F.layer_norm, all bf16"] = TorchNorm(F.layer_norm, dim, bias=True).to(dtype)
    return {name: norm.to(device) for name, norm in norms.items()}


def compile_norm(kind: str, dim: int) -> nn.Module:
    norm = build_norm(kind, dim)
    norm.compile()
    return norm


class TorchNorm(nn.Module):
    """A norm of `torch.nn.functional` with a gain and, if it takes one, a bias."""

    def __init__(self, function: Callable, dim: int, bias: bool):
        super().__init__()
        self.function, self.dim = function, dim
        self.affine = nn.ParameterList(torch.randn(dim) for _ in range(2 if bias else 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, (self.dim,), *self.affine, eps=1e-5)


def forward_backward(norm: nn.Module, x: Tensor, grad_y: Tensor) -> None:
    """Compute new gradients of x and of all parameters."""
    for tensor in (x, *norm.parameters()):
        tensor.grad = None
    norm(x).backward(grad_y)


# --- training --------------------------------------------------------------------------------------------------------


def bench_train(config: StepConfig, device: torch.device) -> Report:
    """Measure a training step, plain and fast, compared with the speed of matrix products alone."""
    fast, size = resolve_fast(None, device, compiled=config.compile), PRODUCT_SIZE[device.type]
    report: Report = {
        "settings": format_settings(config),
        "fast": fast_status(fast),
        "upper bound": f"tokens/s at the speed of a product of two {size}² matrices",
        "fraction": "of that upper bound",
        "rows": [],
    }
    before = peak_memory(device)
    for dtype in measured_dtypes(config, device):
        calls: dict[str, Call] = {}
        for name, accelerated in variants(fast).items():
            model = Llama(config.model_config()).to(device)
            if accelerated:
                accelerate(model)
            calls[name] = make_step(model, config, dtype)
            if "memory of a step, MB" not in report:
                calls[name]()
                report["memory of a step, MB"] = (peak_memory(device) - before) / 1e6
        matrix = torch.randn(size, size, device=device, dtype=dtype)
        seconds = time_alternately(calls | {"product": partial(torch.mm, matrix, matrix)}, config.rounds, device)
        bound = 2 * size**3 / seconds["product"] / flops_per_token(model)
        report[f"product in {short_name(dtype)}, TFLOP/s"] = 2 * size**3 / seconds["product"] / 1e12
        for name in calls:
            speed = config.batch_size * config.context / seconds[name]
            row = {"step": name, "dtype": short_name(dtype), "tokens/s": round(speed)}
            report["rows"].append(row | {"upper bound": round(bound), "fraction": speed / bound})
    return report


def make_step(model: Llama, config: StepConfig, dtype: torch.dtype) -> Call:
    """A training step of `model` on random tokens."""
    device = model.embed_tokens.weight.device
    model.recompute = config.recompute
    loss = torch.compile(model.loss) if config.compile else model.loss
    optimizers = make_optimizers(model, TrainConfig(optimizer=config.optimizer))
    tokens = torch.randint(config.vocab_size, (config.batch_size, config.context + 1), device=device)
    return partial(training_step, loss, optimizers, tokens, dtype)


def training_step(loss: Callable, optimizers: list[Optimizer], tokens: Tensor, dtype: torch.dtype) -> None:
    """Forward, backward, clipping and update, as in train.py."""
    with autocast(tokens.device, dtype):
        value = loss(tokens[:, :-1], tokens[:, 1:])
    value.backward()
    weights = [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]
    nn.utils.clip_grad_norm_(weights, 1.0)
    for optimizer in optimizers:
        optimizer.step()
    for weight in weights:
        weight.grad = None


# --- generation ------------------------------------------------------------------------------------------------------


def bench_generate(config: GenerateConfig, device: torch.device) -> Report:
    """Measure greedy generation, plain and fast, compared with the time to read the weights once per token."""
    fast, dtypes = resolve_fast(None, device), measured_dtypes(config, device)
    report: Report = {
        "settings": format_settings(config),
        "fast": fast_status(fast),
        "upper bound": "tokens/s if a token took as long as torch.dot takes to read as many bytes as the weights have",
        "fraction": "of that upper bound",
        "rows": [],
    }
    batch_sizes = sorted({1, config.samples})
    calls: dict[str, Call] = {}
    for dtype in dtypes:
        for name, accelerated in variants(fast).items():
            model = Llama(config.model_config()).to(device).eval()
            cast_matrices(model, dtype)
            if accelerated:
                accelerate(model)
            for samples in batch_sizes:
                calls[f"{name} {dtype} {samples}"] = partial(generate_tokens, model, dtype, config.tokens, samples)
        weight_bytes = config.model_config().weights * dtype.itemsize
        vectors = torch.randn(2, weight_bytes // 2 // 4, device=device)  # together as large as the weights
        calls[f"reading {dtype}"] = partial(repeat, config.tokens, torch.dot, *vectors)
    seconds = time_alternately(calls, config.rounds, device)
    for dtype in dtypes:
        for name in variants(fast):
            for samples in batch_sizes:
                speed = samples * config.tokens / seconds[f"{name} {dtype} {samples}"]
                bound = samples * config.tokens / seconds[f"reading {dtype}"]
                row = {"model": name, "weights": short_name(dtype), "samples": samples, "tokens/s": round(speed)}
                report["rows"].append(row | {"upper bound": round(bound), "fraction": speed / bound})
    return report


def generate_tokens(model: Llama, dtype: torch.dtype, tokens: int, samples: int) -> None:
    """Generate greedily, as in generate.py."""
    prompts = torch.zeros(samples, 1, dtype=torch.int64)
    with autocast(model.embed_tokens.weight.device, dtype):
        for _ in stream_ids(model, prompts, Sampling(tokens, temperature=0)):
            pass


def repeat(times: int, call: Callable, *args: Any) -> None:
    """Call `times` times. Like the weights, the data may stay in cache."""
    for _ in range(times):
        call(*args)
