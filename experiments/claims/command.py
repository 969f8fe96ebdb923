"""`python ablate.py claim NAME` and `python ablate.py claims`."""

from dataclasses import replace
from pathlib import Path

from config import DEVICES, Parser, check_sizes, require
from experiments.ablation.grid import resolve_devices
from experiments.claims import initial, trained
from experiments.claims.claim import Claim
from experiments.claims.document import write_pages
from experiments.claims.measure import Lab
from experiments.claims.results import commit, read_entries, run_claim
from files import lock_file
from runtime.device import pick_device
from runtime.process import bad_input
from runtime.run_dir import LOCK, RUNS_FOLDER


def on_gpu(claim: Claim) -> Claim:
    """With the scale `gpu`, if runs of train.py decide it."""
    first = next(iter(claim.protocols.values()))
    larger = {"gpu": replace(first, flags=trained.GPU)}
    return replace(claim, protocols={**claim.protocols, **larger}) if first.arms else claim


CLAIMS = {claim.name: on_gpu(claim) for claim in (*initial.CLAIMS, *trained.CLAIMS)}
RESULTS = Path("results", "claims")


def main(arguments: list[str]) -> None:
    """Test one claim or all. Writes results, CLAIMS.md and claims.html, and continues where it was stopped."""
    parser = Parser(prog=f"ablate.py {arguments[0]}", description=main.__doc__, allow_abbrev=False)
    add = parser.add_argument
    if arguments[0] == "claim":
        add("name", choices=CLAIMS, metavar="NAME", help=", ".join(CLAIMS))
    add("--scale", help="scale to measure; see --list (default: all except gpu)")
    add("--list", action="store_true", help="list all claims and their scales, then exit")
    add("--report", action="store_true", help="rewrite the pages from existing results; run nothing")
    add("--results", type=Path, default=RESULTS, metavar="DIR", help=f"results directory (default: {RESULTS})")
    add("--seed", type=int, default=0, metavar="INT", help="first seed (default: 0)")
    add("--jobs", type=int, default=2, metavar="INT", help="runs at a time (default: 2)")
    add("--device", default="cpu", help=f"{DEVICES}; cuda:0,1 spreads the runs over both (default: cpu)")
    add("--cache-dir", default=".cache", metavar="DIR", help="directory for prepared corpora (default: .cache)")
    flags = parser.parse_args(arguments[1:])
    if flags.list:
        for claim in CLAIMS.values():
            print(f"{claim.name}: {', '.join(claim.protocols)}")
        return
    results, runs = flags.results, RUNS_FOLDER / "claims"
    with bad_input():
        check_sizes(flags, "jobs")
        chosen = [CLAIMS[flags.name]] if arguments[0] == "claim" else list(CLAIMS.values())
        known = [(claim, scale) for claim in chosen for scale in claim.protocols]
        wanted = [
            (claim, scale) for claim, scale in known if scale == flags.scale or (not flags.scale and scale != "gpu")
        ]
        require(bool(wanted), f"--scale {flags.scale}: no such scale; see --list")
        devices = tuple(str(pick_device(device)) for device in resolve_devices(flags.device))
        require(results.is_dir() or not flags.report, f"--results {results}: no such directory")  # mistyped
        for folder in (runs, results):
            folder.mkdir(parents=True, exist_ok=True)
    if not flags.report:
        lab = Lab(runs, results / "runs.jsonl", flags.jobs, devices, flags.cache_dir, flags.seed, commit())
        with lock_file(runs / LOCK):
            for claim, scale in wanted:
                run_claim(claim, scale, lab, results)
    with bad_input():
        entries = read_entries(CLAIMS, results)
    write_pages(entries, results)
    for entry in entries:
        if entry.claim in chosen:
            print(f"{entry.claim.name}: {entry.verdict}")
    print(f"see {results.parent.parent / 'CLAIMS.md'}")
