"""Speed beside torch's own, and beside what the machine can do: `python bench.py norms`.

Every figure is a median over rounds in which all that is compared takes turns, since a busy machine is slower for
minutes at a time: ratios of one run can be relied on, milliseconds of two runs cannot be compared.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import decode
import gpu
import growth
from config import ModelConfig, Parser, TrainConfig, add_knobs, check_sizes, knob, require
from exits import as_command, bad_input, exit_codes
from generate import Sampling, generate
from machine import autocast, describe, has_bfloat16, keep_memory, peak_memory, pick_device
from model import Llama
from norms import KINDS, TRAITS, build_norm
from norms.fused import in_use
from optim import make_optimizers
from rounding import round_weights
from run import RUNS, write_whole
from train import flops_per_token

Call = Callable[[], Any]
Report = dict[str, Any]  # what a command found: "rows", each with the same names, and what they are about
PRODUCT = {"cpu": 2048, "cuda": 8192, "mps": 4096}  # size of matrices whose product is the ceiling of training
WARM_UP = 2  # rounds that do not count


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How a command measures. Raises ValueError, in one line that names the flag, for what makes no sense."""

    rounds: int = knob(7, "rounds that count")
    device: str = knob("auto", "where to compute", choices=["auto", "cpu", "cuda", "mps"])
    out: str = knob("", "file for the report, in JSON (default: bench-COMMAND.json under runs/)", metavar="FILE")

    def __post_init__(self) -> None:
        check_sizes(self, "rounds")


@dataclass(frozen=True, kw_only=True)
class NormsConfig(Measured):
    """What `norms` compares."""

    rows: int = knob(8192, "tokens")
    dim: int = knob(768, "features of a token")
    rounds: int = knob(15, "rounds that count")

    def __post_init__(self) -> None:
        check_sizes(self, "rows", "dim", "rounds")


@dataclass(frozen=True, kw_only=True)
class ModelToMeasure(Measured):
    """A model of random weights."""

    dim: int = knob(288, "width of the residual stream")
    layers: int = knob(6, "number of blocks")
    heads: int = knob(6, "attention heads")
    hidden_dim: int = knob(768, "width inside the MLP")
    vocab_size: int = knob(32000, "number of token ids")
    context: int = knob(256, "most tokens of a sequence")

    def model_config(self) -> ModelConfig:
        names = ("dim", "layers", "heads", "hidden_dim", "vocab_size", "context")
        return ModelConfig(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class StepConfig(ModelToMeasure):
    """The training step that `train` measures."""

    batch_size: int = knob(8, "sequences in a step")
    optimizer: str = knob("adamw", "as of train.py", choices=["adamw", "muon"])
    compile: bool = knob(False, "torch.compile both")
    recompute: bool = knob(False, "as of train.py")

    def __post_init__(self) -> None:
        check_sizes(self, "batch_size", "rounds")
        self.model_config()


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ModelToMeasure):
    """The model that `generate` lets speak."""

    tokens: int = knob(200, "tokens of a sample, after one that is given")
    samples: int = knob(8, "samples at a time, beside one")

    def __post_init__(self) -> None:
        check_sizes(self, "tokens", "samples", "rounds")
        require(self.tokens < self.context, f"--tokens {self.tokens} must be below --context {self.context}")
        self.model_config()


@dataclass(frozen=True, kw_only=True)
class GrowthConfig(Measured):
    """How `growth` measures."""

    rounds: int = knob(3, "rounds that count")
    plot: str = knob("runs/growth.png", "file for the plot", metavar="FILE")


@dataclass(frozen=True)
class GPUConfig:
    """What `gpu` runs."""

    part: str = knob(None, "one of its parts (default: all)", choices=list(gpu.PARTS))
    folder: str = knob("runs/gpu", "folder of the results", metavar="DIR")
    device: str = knob("cuda", "where to compute", choices=["cuda"])
    out: str = knob("", "file for the report, in JSON (default: bench-gpu.json under runs/)", metavar="FILE")


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    flags = parse(arguments)
    command, make_config = COMMANDS[flags.command]
    with exit_codes("--rows, --batch-size or --dim"):
        with bad_input():
            names = [field.name for field in dataclasses.fields(make_config)]
            config = make_config(**{name: value for name, value in vars(flags).items() if name in names})
            device = pick_device(config.device)
            out = Path(config.out) if config.out else RUNS / f"bench-{flags.command}.json"
            for file in (out, Path(getattr(config, "plot", out))):
                require(not file.is_dir(), f"{file} is a folder; name a file for the result")
                file.parent.mkdir(parents=True, exist_ok=True)
        keep_memory()
        machine = {"device": describe(device), "torch": torch.__version__, "python": sys.version.split()[0]}
        report: Report = {"command": ["bench.py", *(sys.argv[1:] if arguments is None else arguments)], **machine}
        report |= command(config, device)
        show(report)
        write_whole(out, json.dumps(report, indent=2) + "\n")
        print(f"written to {out}", file=sys.stderr)
        if command is bench_gpu and (code := gpu.exit_code(report["rows"])):
            sys.exit(code)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="bench.py", description="Measure speed beside torch's own and the machine's limit.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (command, config) in COMMANDS.items():
        add_knobs(commands.add_parser(name, help=command.__doc__, description=command.__doc__), config)
    return parser.parse_args(arguments)


def show(report: Report) -> None:
    """Print what is not in the rows, a line each, then the rows as a table."""
    for name, value in report.items():
        if name not in ("rows", "command"):
            print(f"{name}: {shown(value)}")
    rows = report["rows"]
    table = [list(rows[0]), *([shown(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *others in table:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def take_turns(calls: dict[str, Call], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each call, over rounds in which each is made once."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UP + rounds):
        for name, call in calls.items():
            wait_for(device)
            started = time.perf_counter()
            call()
            wait_for(device)
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken[WARM_UP:]) for name, taken in seconds.items()}


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


# --- norms -----------------------------------------------------------------------------------------------------------


def bench_norms(config: NormsConfig, device: torch.device) -> Report:
    """Every norm beside F.layer_norm and a copy: forward, and both forward and backward, in fp32 and bf16."""
    report: Report = {
        "norms on a CPU": in_use(),
        "tokens": config.rows,
        "features": config.dim,
        "ratio": "time over that of F.layer_norm; above 1 is slower",
        "share": "of the speed of a copy, by the bytes that have to be read and written",
        "rows": [],
    }
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        x = torch.randn(config.rows, config.dim, device=device, dtype=dtype, requires_grad=True)
        grad_y, norms = torch.randn_like(x), norms_to_compare(config.dim, device, dtype)
        calls: dict[str, Call] = {"copy": x.detach().clone}
        for name, norm in norms.items():
            calls[f"{name} forward"] = partial(norm, x)
            calls[f"{name} both"] = partial(forward_backward, norm, x, grad_y)
        seconds = take_turns(calls, config.rounds, device)
        report[f"copy in {short}, GB/s"] = 2 * x.nbytes / seconds["copy"] / 1e9
        for name in norms:
            row: dict[str, Any] = {"norm": name, "dtype": short}
            # To read x and write y is a copy; backward reads x and a gradient, and writes one: 1.5 copies more.
            for part, copies in (("forward", 1.0), ("both", 2.5)):
                taken = seconds[f"{name} {part}"]
                row[f"{part} ms"] = 1e3 * taken
                row[f"{part} ratio"] = taken / seconds[f"F.layer_norm {part}"]
                row[f"{part} share"] = copies * seconds["copy"] / taken
            report["rows"].append(row)
    return report


def norms_to_compare(dim: int, device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Every registered kind, with its gain in fp32 as in training, and torch's own."""
    ours = {kind: build_norm(kind, dim) for kind in sorted(KINDS) if not TRAITS[kind].identity}
    theirs = {"F.layer_norm": TorchNorm(F.layer_norm, dim, 2), "F.rms_norm": TorchNorm(F.rms_norm, dim, 1)}
    if dtype != torch.float32:  # the kernels want gains of the dtype of x, but F.layer_norm's is quicker without
        theirs["F.rms_norm"].to(dtype)
        theirs["F.layer_norm, all bf16"] = TorchNorm(F.layer_norm, dim, 2).to(dtype)
    return {name: norm.to(device) for name, norm in (ours | theirs).items()}


class TorchNorm(nn.Module):
    """torch's own function with a gain, and a bias if it takes `parameters` = 2."""

    def __init__(self, function: Callable, dim: int, parameters: int):
        super().__init__()
        self.function, self.dim = function, dim
        self.affine = nn.ParameterList(torch.randn(dim) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, (self.dim,), *self.affine, eps=1e-5)


def forward_backward(norm: nn.Module, x: Tensor, grad_y: Tensor) -> None:
    """The gradients of x and of all parameters, from none."""
    for tensor in (x, *norm.parameters()):
        tensor.grad = None
    norm(x).backward(grad_y)


# --- training --------------------------------------------------------------------------------------------------------


def bench_train(config: StepConfig, device: torch.device) -> Report:
    """A training step beside the same by torch's own functions, and beside matrix products alone."""
    size = PRODUCT[device.type]
    report: Report = {
        "settings": described(config),
        "ceiling": f"tokens/s at the speed of a product of two {size}² matrices",
        "share": "of that ceiling",
        "rows": [],
    }
    before = peak_memory(device)
    tokens = torch.randint(config.vocab_size, (config.batch_size, config.context + 1), device=device)
    for dtype in (torch.bfloat16, torch.float32) if has_bfloat16(device) else (torch.float32,):
        model = Llama(config.model_config()).to(device)
        model.recompute = config.recompute
        optimizers = make_optimizers(model, TrainConfig(optimizer=config.optimizer))
        losses: dict[str, Any] = {"ours": model.loss, "torch": partial(torch_loss, model)}
        calls: dict[str, Call] = {}
        for name, loss in losses.items():
            computed = torch.compile(loss) if config.compile else loss
            calls[name] = partial(training_step, computed, optimizers, tokens, dtype)
        matrix = torch.randn(size, size, device=device, dtype=dtype)
        calls["product"] = partial(torch.mm, matrix, matrix)
        if not report["rows"]:
            calls["ours"]()
            report["memory of a step, MB"] = (peak_memory(device) - before) / 1e6
        seconds = take_turns(calls, config.rounds, device)
        per_step = config.batch_size * config.context
        ceiling = 2 * size**3 / seconds["product"] / flops_per_token(model)
        for name in losses:
            speed = per_step / seconds[name]
            report["rows"].append(
                {
                    "step": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "tokens/s": round(speed),
                    "ceiling": round(ceiling),
                    "share": speed / ceiling,
                }
            )
    return report


def described(config: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items() if value and name != "out")


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


def torch_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """`model.loss` for RMSNorm, pre-norm, as one would write it with torch's own functions."""
    config, norm = model.config, partial(F.rms_norm, normalized_shape=(model.config.dim,), eps=1e-6)
    cos, sin = model.rope(0, tokens.shape[1])  # T D/2
    x = model.embed_tokens(tokens)  # B T C
    for block in model.layers:
        attention, mlp = block.self_attn, block.mlp
        h = norm(x, weight=block.attention_residual.norm.weight)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (p(h).unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for p in projections)  # B H T D
        (a, b), (c, d) = (heads.float().chunk(2, -1) for heads in (q, k))
        q = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(v)
        k = torch.cat((c * cos - d * sin, d * cos + c * sin), -1).type_as(v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
        h = norm(x, weight=block.mlp_residual.norm.weight)
        x = x + mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h))
    logits = model.lm_head(norm(x, weight=model.finish.weight))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# --- generation ------------------------------------------------------------------------------------------------------


def bench_generate(config: GenerateConfig, device: torch.device) -> Report:
    """Greedy generation with weights in each format, beside the time that it takes to read them once a token."""
    report: Report = {
        "settings": described(config),
        "one more token on a CPU": decode.in_use(),
        "ceiling": "tokens/s if a token took as long as reading all weights, as often, by torch.dot or in one product",
        "share": "of that ceiling",
        "rows": [],
    }
    calls: dict[str, Call] = {}
    for dtype in formats_of_weights(device):
        model = Llama(config.model_config()).eval().to(device)
        words = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2) * dtype.itemsize // 4
        round_weights(model, dtype)
        for samples in (1, config.samples):
            calls[f"{dtype} {samples}"] = partial(speak, model, config.tokens, samples)
        calls[f"{dtype} dot"] = partial(again, config.tokens, torch.dot, *torch.randn(2, words // 2, device=device))
        if device.type == "cpu" and decode.available():
            product = decode.Product(torch.randn(words // 1024, 1024))
            calls[f"{dtype} product"] = partial(again, config.tokens, product, torch.randn(1024))
    seconds = take_turns(calls, config.rounds, device)
    for dtype in formats_of_weights(device):
        reading = min(seconds.get(f"{dtype} {how}", math.inf) for how in ("dot", "product")) / config.tokens
        for samples in (1, config.samples):
            speed, ceiling = samples * config.tokens / seconds[f"{dtype} {samples}"], samples / reading
            row = {"weights": str(dtype).removeprefix("torch."), "samples": samples, "tokens/s": round(speed)}
            report["rows"].append(row | {"ceiling": round(ceiling), "share": speed / ceiling})
    return report


def again(times: int, call: Callable, *args: Any) -> None:
    """As a run of so many tokens does: what is read again and again may lie in a cache by then."""
    for _ in range(times):
        call(*args)


def formats_of_weights(device: torch.device) -> list[torch.dtype]:
    bfloat16 = [torch.bfloat16] if has_bfloat16(device) else []
    return [torch.float32, *bfloat16, *([torch.int8] if device.type == "cpu" else [])]


def speak(model: Llama, tokens: int, samples: int) -> None:
    for _ in generate(model, [0], Sampling(tokens, temperature=0), end_of_document=-1, samples=samples):
        pass


# --- growth, and a card ----------------------------------------------------------------------------------------------


def bench_growth(config: GrowthConfig, device: torch.device) -> Report:
    """Tokens/s and memory of a step against width, depth, context and batch, and what theory says; with a plot."""
    base = StepConfig(
        dim=256,
        layers=4,
        heads=4,
        hidden_dim=704,
        vocab_size=2048,
        batch_size=16,
        rounds=config.rounds,
        device=device.type,
    )
    costs = growth.measure(base, step_cost)
    growth.plot(costs, base, Path(config.plot))
    rows = []
    for cost in costs:
        middle = next(there for there in costs if (there.axis, there.value) == (cost.axis, getattr(base, cost.axis)))
        speed, memory = growth.in_theory(cost, middle)
        rows.append(
            {
                "axis": f"{cost.axis} {cost.value}",
                "tokens/s": round(cost.tokens_per_second),
                "in theory": round(speed),
                "MB": round(cost.memory / 1e6),
                "MB in theory": round(memory / 1e6),
            }
        )
    return {"settings": described(base), "plot": config.plot, "rows": rows}


def step_cost(config: StepConfig) -> tuple[float, float, float, float, float]:
    """What `growth.Cost` holds of one shape, after axis and value."""
    device = torch.device(config.device)
    keep_memory()
    before = peak_memory(device)
    model = Llama(config.model_config()).to(device)
    optimizers = make_optimizers(model, TrainConfig(optimizer=config.optimizer))
    tokens = torch.randint(config.vocab_size, (config.batch_size, config.context + 1), device=device)
    dtype = torch.bfloat16 if has_bfloat16(device) else torch.float32
    seconds = take_turns({"step": partial(training_step, model.loss, optimizers, tokens, dtype)}, config.rounds, device)
    per_step = config.batch_size * config.context
    weights = sum(weight.nbytes for weight in model.parameters())
    return (
        per_step / seconds["step"],
        peak_memory(device) - before,
        flops_per_token(model),
        4 * weights,  # and gradients, and two moments
        per_step * config.layers * config.dim,
    )


def bench_gpu(config: GPUConfig, device: torch.device) -> Report:
    """All that is worth to know of a card, in parts of at most eight minutes."""
    names = [config.part] if config.part else list(gpu.PARTS)
    return {"folder": config.folder, "rows": gpu.run_parts(names, Path(config.folder))}


COMMANDS: dict[str, tuple[Callable[[Any, torch.device], Report], Any]] = {
    "norms": (bench_norms, NormsConfig),
    "train": (bench_train, StepConfig),
    "generate": (bench_generate, GenerateConfig),
    "growth": (bench_growth, GrowthConfig),
    "gpu": (bench_gpu, GPUConfig),
}


if __name__ == "__main__":
    as_command(main)
