"""Speed beside torch's own, and beside what the machine can do: `python bench.py norms`.

Every figure is a median over rounds in which all that is compared takes turns, since a busy machine is slower for
minutes at a time: ratios of one run can be relied on, milliseconds of two runs cannot be compared.
"""

import argparse
import dataclasses
import json
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

from config import Parser, add_knobs, check_sizes, knob
from exits import bad_input, exit_codes
from machine import describe, keep_memory, pick_device
from norms import KINDS, TRAITS, build_norm
from norms.fused import in_use
from run import RUNS, write_whole

Call = Callable[[], Any]
Report = dict[str, Any]  # what a command found: "rows", each with the same names, and what they are about
WARM_UP = 2  # rounds that do not count


@dataclass(frozen=True)
class NormsConfig:
    """What `norms` compares. Raises ValueError, in one line that names the flag, for what makes no sense."""

    rows: int = knob(8192, "tokens")
    dim: int = knob(768, "features of a token")
    rounds: int = knob(15, "rounds that count")
    device: str = knob("auto", "where to compute", choices=["auto", "cpu", "cuda", "mps"])
    out: str = knob("", "file for the report, in JSON (default: bench-norms.json under runs/)", metavar="FILE")

    def __post_init__(self) -> None:
        check_sizes(self, "rows", "dim", "rounds")


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    flags = parse(arguments)
    command, make_config = COMMANDS[flags.command]
    with exit_codes("--rows or --dim"):
        with bad_input():
            names = [field.name for field in dataclasses.fields(make_config)]
            config = make_config(**{name: value for name, value in vars(flags).items() if name in names})
            device = pick_device(config.device)
            out = Path(config.out) if config.out else RUNS / f"bench-{flags.command}.json"
            out.parent.mkdir(parents=True, exist_ok=True)
        keep_memory()
        machine = {"device": describe(device), "torch": torch.__version__, "python": sys.version.split()[0]}
        report = {"command": ["bench.py", *(sys.argv[1:] if arguments is None else arguments)], **machine}
        report |= command(config, device)
        show(report)
        write_whole(out, json.dumps(report, indent=2) + "\n")
        print(f"written to {out}", file=sys.stderr)


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


COMMANDS: dict[str, tuple[Callable[[Any, torch.device], Report], Any]] = {"norms": (bench_norms, NormsConfig)}


if __name__ == "__main__":
    main()
