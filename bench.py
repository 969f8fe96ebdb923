"""Measure speed: `python bench.py COMMAND`. The measurements are in `experiments/`."""

if __name__ == "__main__":  # before the imports, which take seconds
    from runtime.process import start

    start()

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from config import Parser, add_options
from experiments import gpu
from experiments.benchmarks import (
    GenerateConfig,
    NormsConfig,
    Report,
    StepConfig,
    bench_generate,
    bench_norms,
    bench_train,
)
from experiments.destinations import check_file
from experiments.growth import GrowthConfig, bench_growth
from experiments.plan import PlanConfig, bench_plan
from experiments.preparation import PrepareConfig, bench_prepare
from files import write_atomically
from runtime.device import describe, pick_device
from runtime.plugins import add_import_flag, import_files
from runtime.process import bad_input, exit_codes
from runtime.run_dir import RUNS_FOLDER

# The function of each command, whose docstring is its help, and the dataclass of its options.
COMMANDS: dict[str, tuple[Callable[[Any, torch.device], Report], Any]] = {
    "norms": (bench_norms, NormsConfig),
    "train": (bench_train, StepConfig),
    "generate": (bench_generate, GenerateConfig),
    "growth": (bench_growth, GrowthConfig),
    "prepare": (bench_prepare, PrepareConfig),
    "plan": (bench_plan, PlanConfig),
    "gpu": (gpu.bench_gpu, gpu.GPUConfig),
}


def main(arguments: list[str] | None = None) -> None:
    flags = parse(arguments)
    with exit_codes("--rows, --batch-size or --dim"):
        with bad_input():
            import_files(flags.imports)
            config = make_config(flags)
            device = pick_device(config.device)
            out = Path(config.out) if config.out else RUNS_FOLDER / f"bench-{flags.command}.json"
            files = [out, Path(getattr(config, "plot", out))]
            for file in files:
                check_file(file)
            for file in files:
                file.parent.mkdir(parents=True, exist_ok=True)
        report: Report = {
            "command": ["bench.py", *(sys.argv[1:] if arguments is None else arguments)],
            "device": describe(device),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        }
        report |= COMMANDS[flags.command][0](config, device)
        print_report(report)
        write_atomically(out, json.dumps(report, indent=2) + "\n")
        print(f"written to {out}", file=sys.stderr)
        if flags.command == "gpu" and (code := gpu.exit_code(report["rows"])):
            sys.exit(code)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="bench.py", description="Measure speed, compared with PyTorch's own functions and the machine's limits."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (command, config) in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        add_options(subparser, config)
        if name == "norms":
            add_import_flag(subparser)
    parser.set_defaults(imports=[])
    return parser.parse_args(arguments)


def make_config(flags: argparse.Namespace) -> Any:
    """The options of the command as its dataclass. Raises ValueError for invalid values."""
    given = {name: value for name, value in vars(flags).items() if name not in ("command", "imports")}
    return COMMANDS[flags.command][1](**given)


def print_report(report: Report) -> None:
    """Print all entries except the rows, one per line, then the rows as a table."""
    for name, value in report.items():
        if name not in ("rows", "command"):
            print(f"{name}: {format_cell(value)}")
    rows = report["rows"]
    table = [list(rows[0]), *([format_cell(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *others in table:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))


def format_cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
