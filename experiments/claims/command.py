"""`python ablate.py claim NAME` and `python ablate.py claims`."""

from pathlib import Path

from config import DEVICES, Parser, check_sizes, require
from experiments.ablation.processes import resolve_devices
from experiments.claims import quick, training
from experiments.claims.claim import SCALES
from experiments.claims.document import to_markdown
from experiments.claims.measure import Lab
from experiments.claims.results import draw, read_entries, run_claim
from files import lock_file, write_atomically
from runtime.device import pick_device
from runtime.process import bad_input
from runtime.run_dir import LOCK, RUNS_FOLDER

CLAIMS = {claim.name: claim for claim in (*training.CLAIMS, *quick.CLAIMS)}


def main(arguments: list[str]) -> None:
    """Test one claim or all, and write results and CLAIMS.md."""
    single = arguments[0] == "claim"
    parser = Parser(prog=f"ablate.py {arguments[0]}", description=main.__doc__, allow_abbrev=False)
    if single:
        parser.add_argument("name", choices=CLAIMS, metavar="NAME", help=", ".join(CLAIMS))
    parser.add_argument("--scale", choices=SCALES, help="default: the smallest that the claim has; quick for claims")
    parser.add_argument("--list", action="store_true", help="list all claims with their scales and minutes, then exit")
    parser.add_argument(
        "--report", action="store_true", help="write figures and CLAIMS.md from the results; run nothing"
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="results directory (default: results)")
    parser.add_argument(
        "--runs", type=Path, default=RUNS_FOLDER / "claims", help="run directory (default: runs/claims)"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="INT", help="runs at a time (default: 2)")
    parser.add_argument(
        "--device",
        default="auto",
        help=f"{DEVICES}; cuda:0,1 spreads the runs over both (default: cuda for --scale gpu, else cpu)",
    )
    parser.add_argument("--cache-dir", default=".cache", metavar="DIR", help="directory for prepared corpora")
    flags = parser.parse_args(arguments[1:])
    if flags.list:
        for claim in CLAIMS.values():
            scales = ", ".join(f"{scale} {protocol.minutes:g}" for scale, protocol in claim.protocols.items())
            print(f"{claim.name} ({scales}): {claim.statement}")
        return
    with bad_input():
        check_sizes(flags, "jobs")
        chosen = [CLAIMS[flags.name]] if single else list(CLAIMS.values())
        scale = flags.scale or (next(iter(chosen[0].protocols)) if single else "quick")
        chosen = [claim for claim in chosen if scale in claim.protocols]
        require(bool(chosen), f"claim {getattr(flags, 'name', '')} has no protocol for --scale {scale}")
        devices = resolve_devices(flags.device if flags.device != "auto" or scale == "gpu" else "cpu")
        devices = tuple(str(pick_device(device)) for device in devices)
        require(scale != "gpu" or devices[0].startswith("cuda") or flags.report, "--scale gpu needs a GPU")
        # With a mistyped folder, CLAIMS.md would say that no claim was run.
        require(flags.results.is_dir() or not flags.report, f"--results {flags.results}: no such directory")
        flags.runs.mkdir(parents=True, exist_ok=True)
    if not flags.report:
        lab = Lab(flags.runs, flags.jobs, devices, flags.cache_dir)
        with lock_file(flags.runs / LOCK):
            for claim in chosen:
                judgment = run_claim(claim, scale, lab, flags.results)
                print(f"{claim.statement}: {judgment.verdict} ({judgment.ours}; {judgment.reason})", flush=True)
    with bad_input():
        entries = read_entries(CLAIMS, flags.results)
        for entry in entries if flags.report else []:
            if entry.content:
                draw(entry, flags.results)
        document = flags.results.parent / "CLAIMS.md"
        write_atomically(document, to_markdown(entries, flags.results.name))
    print(f"see {document}")
