"""Compare norms and other options, or `compare` existing runs. The code is in `experiments/`."""

if __name__ == "__main__":
    from machine.process import start

    start()

import shlex
import sys

from config import Asked
from experiments.ablation import AblationConfig, resolve_ablation, run_ablation
from experiments.arms import pop_options
from experiments.compare import main as compare_command
from files import lock_file
from machine.process import bad_input, exit_codes
from runtime.flags import Parser, add_flags, add_options
from runtime.run_dir import LOCK


def main(arguments: list[str]) -> None:
    with exit_codes("--jobs, --micro-batch-size, --context or --dim"):
        if arguments[:1] == ["compare"]:
            return compare_command(arguments)
        options, shared = parse(arguments)
        with bad_input():
            grid = resolve_ablation(options, shared)
        with lock_file(grid.folder / LOCK):
            summary = run_ablation(grid, shlex.join(["python", "ablate.py", *arguments]))
    print(*summary, f"see {grid.folder}/report.html or {grid.folder}/table.md", sep="\n")


def parse(arguments: list[str]) -> tuple[AblationConfig, Asked]:
    """The options of the comparison, and what all its runs ask of train.py."""
    parser = Parser(
        prog="ablate.py",
        description="Train every combination of norms, placements, other factors and seeds, and report on them. "
        "`ablate.py compare DIR DIR ...`, with a --help of its own, compares existing runs.",
    )
    add_options(parser.add_argument_group("comparison"), AblationConfig)
    # Refused later: they are for single runs.
    add_flags(parser, hidden=("norm", "placement", "norm_args", "placement_args", "init_from"))
    asked = parser.read(arguments)
    return pop_options(asked, AblationConfig), asked


if __name__ == "__main__":
    main(sys.argv[1:])
