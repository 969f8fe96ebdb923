"""Measure speed: `python bench.py COMMAND`. The measurements are in `experiments/`."""

if __name__ == "__main__":
    from machine.process import start

    start()

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from experiments import benchmarks
from experiments.arms import pop_options
from files import require, write_atomically
from machine.device import describe, pick_device, set_up_cpu
from machine.process import bad_input, exit_codes
from runtime.flags import Parser, add_flags, add_options

WIDTH = 16  # of a column
# The function of each command and its own options. All but `norms` also take those of train.py.
COMMANDS: dict[str, tuple[Any, Any]] = {
    "norms": (benchmarks.bench_norms, benchmarks.NormsConfig),
    "train": (benchmarks.bench_train, benchmarks.RoundsConfig),
    "generate": (benchmarks.bench_generate, benchmarks.GenerateConfig),
}


def main(arguments: list[str]) -> None:
    with exit_codes("--rows, --micro-batch-size or --dim"):
        with bad_input():
            name, out, config = parse(arguments)
            device = pick_device(config.device)
            require(out.is_file() or not out.exists(), f"--json {out} is not a regular file; name another")
            out.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "command": shlex.join(["bench.py", *arguments]),
            "device": describe(device),
            "torch": torch.__version__,
        }
        report |= COMMANDS[name][0](config, device)
        print_report(report)
        write_atomically(out, json.dumps(report, indent=2) + "\n")
        print(f"written to {out}", file=sys.stderr)


def parse(arguments: list[str]) -> tuple[str, Path, Any]:
    """The command, the file for its report, and its options. Raises ValueError for invalid values."""
    parser = Parser(prog="bench.py", description="Measure speed, compared with the limits of the machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (command, options) in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        subparser.add_argument("--json", metavar="FILE", help=f"file for the report (default: runs/bench-{name}.json)")
        add_options(subparser, options)
        if name != "norms":
            add_flags(subparser)
    given = parser.read(arguments)
    name = given.pop("command")
    out = Path(given.pop("json", f"runs/bench-{name}.json"))
    config = pop_options(given, COMMANDS[name][1])
    return name, out, config if name == "norms" else benchmarks.with_model(config, given)


def print_report(report: benchmarks.Report) -> None:
    """Print all entries except the rows, one per line, then the rows as a table."""
    for name, value in report.items():
        if name != "rows":
            print(f"{name}: {value}")
    print(*(name.ljust(WIDTH) for name in report["rows"][0]))
    for row in report["rows"]:
        print(*(f"{cell:<{WIDTH}.3g}" if type(cell) is float else f"{cell!s:<{WIDTH}}" for cell in row.values()))


if __name__ == "__main__":
    set_up_cpu()
    main(sys.argv[1:])
