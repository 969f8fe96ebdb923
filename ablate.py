"""Compare norms: `python ablate.py --norms rmsnorm layernorm --placements pre post --seeds 3 --steps 200`.

`python ablate.py claim NAME` tests one of the claims in CLAIMS.md, and `python ablate.py claims` all of them.
`python ablate.py compare DIR DIR ...` compares runs that exist.

The code is in `experiments/ablation/`.
"""

if __name__ == "__main__":  # before the imports, which take seconds
    from runtime.process import start

    start()

import argparse
import shlex
import sys
from functools import partial

from config import MAX_SIZE, Parser, add_flags, match_case
from experiments.ablation.run import resolve_ablation, run_ablation
from experiments.claims.command import main as claims_command
from experiments.compare import main as compare_command
from files import lock_file
from norms.placement import PLACEMENTS
from runtime.plugins import import_first
from runtime.process import bad_input, exit_codes
from runtime.run_dir import LOCK


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    with exit_codes("--jobs, --micro-batch-size, --context or --dim"):
        if arguments[:1] in (["claim"], ["claims"]):
            claims_command(arguments)
            return
        if arguments[:1] == ["compare"]:
            compare_command(arguments[1:])
            return
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
        description="Train norms × placements × other factors × seeds and report on them. Subcommands: "
        "`ablate.py compare DIR DIR ...` compares runs that exist; `ablate.py claim NAME` and `ablate.py claims` test "
        "published claims. Each has its own --help.",
        allow_abbrev=False,
    )
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for parser in (everything, own):  # without abbreviations: --seed is not --seeds
        add = parser.add_argument_group("comparison").add_argument
        add(
            "--norms",
            nargs="+",
            default=["rmsnorm"],
            metavar="KIND[:KEY=VALUE,...]",
            help="norms to compare; the first is the baseline (default: rmsnorm)",
        )
        add(
            "--placements",
            nargs="+",
            default=["pre"],
            choices=PLACEMENTS,
            type=partial(match_case, choices=PLACEMENTS),
            help="placements to compare; the first is the baseline (default: pre)",
        )
        add(
            "--factor",
            action="append",
            default=[],
            metavar="NAME=V1,V2",
            help="values of any other option, such as optimizer=muon,adamw; the first is the baseline; may be repeated",
        )
        add("--seeds", type=int, default=3, help="runs per arm, counting from --seed (default: 3)")
        help = "learning rates to try, together with --lr, on two other seeds; each arm is reported at its optimum"
        add("--lrs", nargs="+", type=float, default=[], metavar="LR", help=help)
        help = "how many more rates or seeds an arm may try until its optimum is found, such as 8 (default: 0)"
        add("--widen", type=int, default=0, metavar="INT", help=help)
        help = "also test whether arms are as good as the baseline: within this margin of its val_bpb"
        add("--equivalence", type=float, metavar="MARGIN", help=help)
        add("--jobs", type=int, help="runs at a time on each device (default: one per core, or one on a GPU)")
        add("--threads", type=int, default=1, help="CPU threads per run (default: 1)")
        add("--probe", action="store_true", help="--watch at the first and the last step only")
    add_flags(everything, hidden=("norm", "placement"))  # for single runs: `resolve_ablation` refuses them
    import_first(everything, arguments)
    own.add_argument("--out")
    own.add_argument("--device")  # cuda:0,1 means several, of which each run gets one
    flags, train_flags = everything.parse_args(arguments), own.parse_known_args(arguments)[1]
    return flags, [*train_flags, *(["--watch", str(MAX_SIZE)] if flags.probe else [])]


if __name__ == "__main__":
    main()
