"""`python ablate.py claim NAME`: a JSON file with all runs, and a figure, for each claim."""

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from config import DEVICES, Parser, check_sizes, require
from data.corpus import RULES
from experiments.ablation.grid import resolve_devices
from experiments.claims import initial, trained
from experiments.claims.claim import Claim
from experiments.claims.document import RESULTS, write_pages
from experiments.claims.judge import Entry, judge
from experiments.claims.measure import Lab, train
from experiments.statistics import holm
from files import lock_file, read_json, write_atomically
from runtime.device import describe
from runtime.process import bad_input
from runtime.run import commit
from runtime.run_dir import LOCK, RUNS_FOLDER

CLAIMS = {claim.name: claim for claim in (*initial.CLAIMS, *trained.CLAIMS)}


def main(arguments: list[str]) -> None:
    """Test a claim and write CLAIMS.md and claims.html. Continues if it was stopped. Without NAME, only write them."""
    parser = Parser(prog="ablate.py claim", description=main.__doc__)
    add = parser.add_argument
    add("name", nargs="?", choices=CLAIMS, metavar="NAME", help=", ".join(CLAIMS))
    add("--scale", help="scale of the protocol, such as S or gpu (default: all except gpu)")
    add(
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder of both pages and results/claims/, which are replaced (default: .)",
    )
    add("--seed", type=int, default=0, metavar="INT", help="first seed (default: 0)")
    add("--jobs", type=int, default=2, metavar="INT", help="runs at a time (default: 2)")
    add("--device", default="cpu", help=f"{DEVICES}; cuda:0,1 spreads the runs over two GPUs (default: cpu)")
    add("--cache-dir", default=".cache", metavar="DIR", help="directory for prepared corpora (default: .cache)")
    flags = parser.parse_args(arguments[1:])
    results, runs = flags.out / RESULTS, RUNS_FOLDER / "claims"
    if flags.name:
        claim = CLAIMS[flags.name]
        scales = [flags.scale] if flags.scale else [scale for scale in claim.protocols if scale != "gpu"]
        with bad_input():
            check_sizes(flags, "jobs")
            require(scales[0] in claim.protocols, f"--scale {flags.scale}: choose from {', '.join(claim.protocols)}")
            devices = resolve_devices(flags.device)
            for folder in (runs, results):
                folder.mkdir(parents=True, exist_ok=True)
        lab = Lab(runs, flags.jobs, devices, flags.cache_dir, flags.seed)
        with lock_file(runs / LOCK):
            for scale in scales:
                run_claim(claim, scale, lab, results)
    with bad_input():
        entries = read_entries(CLAIMS, results)
        require(entries, f"there are no results in {results}; name a claim: {', '.join(CLAIMS)}")
    write_pages(entries, flags.out)
    verdicts = {entry.claim.name: entry.verdict for entry in entries}
    for name in [flags.name] if flags.name else CLAIMS:
        print(f"{name}: {verdicts.get(name, 'not run')}")
    print(f"see {flags.out / 'CLAIMS.md'}")


def run_claim(claim: Claim, scale: str, lab: Lab, results: Path) -> None:
    """Measure a claim at a scale, and add it to its results."""
    protocol, started = claim.protocols[scale], time.process_time()
    file = results / f"{claim.name}.json"
    with bad_input():
        content = read_json(file, dict) if file.exists() else {}
        earlier = content.get(scale, {}).get("environment", {}).get("rules", RULES if not protocol.arms else None)
        same = scale not in content or earlier == RULES
        require(same, f"{file} has results on text that other rules split (scale {scale}); name another --out")
    measured = (train if protocol.arms or not claim.measure else claim.measure)(protocol, lab)
    rows = measured["runs"] + measured.get("search", [])
    seconds = sum(row.get("seconds") or 0 for row in rows)
    environment = {
        "protocol": claim.hash(scale),
        "rules": RULES,
        "commits": sorted({row.get("commit", commit()) or "unknown" for row in rows}),
        "device": describe(torch.device(lab.devices[0] if protocol.arms else "cpu")),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hours": round((time.process_time() - started + seconds) / 3600, 3),
    }
    content[scale] = {"environment": environment, "protocol": asdict(protocol), "measured": measured}
    write_atomically(file, json.dumps(content) + "\n")


def read_entries(claims: Mapping[str, Claim], results: Path) -> list[Entry]:
    """The claims that were measured. Raises ValueError if one had other rules."""
    entries = []
    for claim in claims.values():
        file = results / f"{claim.name}.json"
        content = read_json(file, dict) if file.exists() else {}
        judgments = {}
        for scale, protocol in claim.protocols.items():
            if scale in content:
                same = content[scale]["environment"]["protocol"] == claim.hash(scale)
                require(same, f"{file} was measured with other rules at scale {scale}; run the claim again")
                judgments[scale] = judge(claim, protocol, content[scale]["measured"])
        if judgments:
            entries.append(Entry(claim, content, judgments))
    trained = [entry for entry in entries if next(iter(entry.claim.protocols.values())).arms]
    corrected = holm([next(iter(entry.judgments.values())).p for entry in trained])
    for entry, p in zip(trained, corrected, strict=True):
        entry.p = p
    return entries
