"""Compare norms: `python ablate.py --norms rmsnorm layernorm --placements pre post --seeds 3 --steps 200`.

`python ablate.py claim NAME` tests one of the claims in CLAIMS.md.
`python ablate.py compare DIR DIR ...` compares existing runs.

The code is in `experiments/`.
"""

if __name__ == "__main__":  # before the imports, which take seconds
    from runtime.process import start

    start()

import argparse
import shlex
import sys
from dataclasses import asdict

from config import MAX_SIZE, Parser, add_flags, add_options
from experiments.ablation.run import AblationConfig, resolve_ablation, run_ablation
from experiments.compare import main as compare_command
from experiments.studies.command import main as claim_command
from files import lock_file
from runtime.plugins import import_first
from runtime.process import bad_input, exit_codes
from runtime.run_dir import LOCK


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    with exit_codes("--jobs, --micro-batch-size, --context or --dim"):
        commands = {"claim": claim_command, "compare": compare_command}
        if arguments and arguments[0] in commands:
            return commands[arguments[0]](arguments)
        flags, train_flags = parse(arguments)
        with bad_input():
            ablation = resolve_ablation(flags, train_flags)
        folder = ablation.grid.folder
        with lock_file(folder / LOCK):
            run_ablation(ablation, shlex.join(["python", "ablate.py", *arguments]))
    print(f"see {folder}/report.html or {folder}/table.md")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """All flags, and the part of `arguments` that belongs to train.py, which every run gets."""
    everything = Parser(
        prog="ablate.py",
        description="Train every combination of norms, placements, other factors and seeds, and report on them. "
        "Subcommands: `ablate.py compare DIR DIR ...` compares existing runs; `ablate.py claim NAME` tests a "
        "published claim. Each has its own --help.",
    )
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for parser in (everything, own):  # without abbreviations: --seed is not --seeds
        add_options(parser.add_argument_group("comparison"), AblationConfig)
    hidden = ("norm", "placement", "norm_args", "init_from")  # for single runs: `resolve_ablation` refuses them
    add_flags(everything, hidden)
    import_first(everything, arguments)
    own.add_argument("--out")
    own.add_argument("--device")  # cuda:0,1 means several, of which each run gets one
    given, train_flags = everything.parse_args(arguments), own.parse_known_args(arguments)[1]
    flags = argparse.Namespace(**asdict(AblationConfig()) | vars(given))
    if flags.probe:
        train_flags += ["--watch", str(MAX_SIZE)]
    return flags, train_flags


if __name__ == "__main__":
    main()
