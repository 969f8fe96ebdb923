"""`python ablate.py claim NAME` and `python ablate.py claims`."""

import sys
from pathlib import Path

from config import DEVICES, Parser, check_sizes, require
from experiments.ablation.processes import resolve_devices
from experiments.claims import load_claims
from experiments.claims.claim import SCALES, Lab
from experiments.claims.document import to_html, to_markdown
from experiments.claims.results import draw, read_entries, results_file, run_claim
from experiments.destinations import check_file, make_folder
from files import write_atomically
from runtime.device import pick_device
from runtime.process import bad_input
from runtime.run_dir import RUNS_FOLDER, locked


def main(arguments: list[str]) -> None:
    """Test one claim or all, and write the results, CLAIMS.md and claims.html."""
    claims = load_claims()
    single = arguments[0] == "claim"
    parser = Parser(prog=f"ablate.py {arguments[0]}", description=main.__doc__, allow_abbrev=False)
    if single:
        parser.add_argument("name", choices=claims, metavar="NAME", help=", ".join(claims))
    parser.add_argument("--scale", choices=SCALES, help="default: the smallest that the claim has; quick for claims")
    parser.add_argument(
        "--report", action="store_true", help="run nothing; write figures, CLAIMS.md and claims.html from the results"
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="results directory (default: results)")
    parser.add_argument(
        "--runs", type=Path, default=RUNS_FOLDER / "claims", help="run directory (default: runs/claims)"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="INT", help="runs at a time (default: 2)")
    parser.add_argument("--threads", type=int, default=1, metavar="INT", help="CPU threads per run (default: 1)")
    parser.add_argument(
        "--device",
        default="auto",
        help=f"{DEVICES}; cuda:0,1 spreads the runs over both (default: cuda for --scale gpu, else cpu)",
    )
    parser.add_argument("--cache-dir", default=".cache", metavar="DIR", help="directory for prepared corpora")
    flags = parser.parse_args(arguments[1:])
    with bad_input():
        check_sizes(flags, "jobs", "threads")
        chosen = [claims[flags.name]] if single else list(claims.values())
        scale = flags.scale or (next(iter(chosen[0].protocols)) if single else "quick")
        chosen = [claim for claim in chosen if scale in claim.protocols]
        require(bool(chosen), f"claim {getattr(flags, 'name', '')} has no protocol for --scale {scale}")
        named = resolve_devices(flags.device if flags.device != "auto" or scale == "gpu" else "cpu")
        devices = [pick_device(device) for device in named]
        require(scale != "gpu" or devices[0].type == "cuda" or flags.report, "--scale gpu needs a GPU")
        # With a mistyped folder, CLAIMS.md would say that no claim was run.
        require(flags.results.is_dir() or not flags.report, f"--results {flags.results}: no such directory")
        document, page = (flags.results.parent / name for name in ("CLAIMS.md", "claims.html"))
        for file in (document, page):
            check_file(file)
        if not flags.report:
            make_folder("--runs", flags.runs)
            make_folder("--results", flags.results)
            for claim in chosen:
                file = results_file(flags.results, claim, scale)
                file.parent.mkdir(parents=True, exist_ok=True)
                check_file(file)
                check_file(file.with_suffix(".png"))
    if not flags.report:
        with locked(flags.runs):
            for claim in chosen:
                lab = Lab(flags.runs, scale, flags.jobs, flags.threads, tuple(map(str, devices)), flags.cache_dir)
                judgment = run_claim(claim, lab, flags.results)
                print(f"{claim.number}. {claim.statement}: {judgment.verdict} ({judgment.ours}; {judgment.reason})")
                sys.stdout.flush()
    with bad_input():
        entries = read_entries(claims, flags.results)
        for entry in entries if flags.report else []:
            if entry.content:
                draw(entry.claim, entry.content["measured"], results_file(flags.results, entry.claim, entry.scale))
        write_atomically(page, to_html(entries))
        write_atomically(document, to_markdown(entries, flags.results.name))
        print(f"see {document}")
