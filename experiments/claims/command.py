"""`python ablate.py claim NAME`: a JSON file and a figure for each claim, and a ledger of all runs."""

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from config import DEVICES, Parser, check_sizes, require
from experiments.ablation.grid import resolve_devices
from experiments.claims import initial, trained
from experiments.claims.claim import Claim
from experiments.claims.document import write_pages
from experiments.claims.judge import Entry, judge
from experiments.claims.measure import Lab, train
from experiments.statistics import holm
from files import lock_file, read_json, write_atomically
from runtime.device import describe, pick_device
from runtime.process import bad_input
from runtime.run import commit
from runtime.run_dir import LOCK, RUNS_FOLDER


def on_gpu(claim: Claim) -> Claim:
    """With the scale `gpu`."""
    first = next(iter(claim.protocols.values()))
    return replace(claim, protocols={**claim.protocols, "gpu": replace(first, flags=trained.GPU)})


CLAIMS = {claim.name: claim for claim in (*initial.CLAIMS, *map(on_gpu, trained.CLAIMS))}
RESULTS = Path("results", "claims")


def main(arguments: list[str]) -> None:
    """Test claims and write CLAIMS.md and claims.html. Continues what was stopped; without a NAME, only writes."""
    parser = Parser(prog="ablate.py claim", description=main.__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=", ".join(CLAIMS))
    add("--scale", help="scale to measure, such as S or gpu (default: all except gpu)")
    add("--results", type=Path, default=RESULTS, metavar="DIR", help=f"folder in a folder results (default: {RESULTS})")
    add("--seed", type=int, default=0, metavar="INT", help="first seed (default: 0)")
    add("--jobs", type=int, default=2, metavar="INT", help="runs at a time (default: 2)")
    add("--device", default="cpu", help=f"{DEVICES}; cuda:0,1 spreads the runs over both (default: cpu)")
    add("--cache-dir", default=".cache", metavar="DIR", help="directory for prepared corpora (default: .cache)")
    flags = parser.parse_args(arguments[1:])
    results = flags.results
    runs = RUNS_FOLDER / "claims"
    with bad_input():
        check_sizes(flags, "jobs")
        unknown = [name for name in flags.names if name not in CLAIMS]
        require(not unknown, f"no such claim: {', '.join(unknown)}; choose from {', '.join(CLAIMS)}")
        chosen = [CLAIMS[name] for name in flags.names]
        known = {scale for claim in chosen or CLAIMS.values() for scale in claim.protocols}
        scales = {flags.scale} if flags.scale else known - {"gpu"}
        require(scales <= known, f"--scale {flags.scale}: no such scale; choose from {', '.join(sorted(known))}")
        wanted = [(claim, scale) for claim in chosen for scale in claim.protocols if scale in scales]
        devices = tuple(str(pick_device(device)) for device in resolve_devices(flags.device))
        require(wanted or results.is_dir(), f"--results {results}: no such directory")  # mistyped
        require(results.parent.name == "results", f"--results {results}: name a folder inside a folder results")
        for folder in (runs, results):
            folder.mkdir(parents=True, exist_ok=True)
    if wanted:
        lab = Lab(runs, results / "runs.jsonl", flags.jobs, devices, flags.cache_dir, flags.seed, commit() or "unknown")
        with lock_file(runs / LOCK):
            for claim, scale in wanted:
                run_claim(claim, scale, lab, results)
    with bad_input():
        entries = read_entries(CLAIMS, results)
    write_pages(entries, results)
    verdicts = {entry.claim.name: entry.verdict for entry in entries}
    for name in flags.names or CLAIMS:
        print(f"{name}: {verdicts.get(name, 'not run')}")
    print(f"see {results.parent.parent / 'CLAIMS.md'}")


def run_claim(claim: Claim, scale: str, lab: Lab, results: Path) -> None:
    """Measure a claim at a scale, and add it to its results."""
    protocol = claim.protocols[scale]
    started = time.process_time()
    measured = (train if protocol.arms or not claim.measure else claim.measure)(protocol, lab)
    seconds = sum(row.get("seconds") or 0 for row in measured["runs"] + measured.get("search", []))
    environment = {
        "protocol": claim.hash(scale),
        "commits": sorted({row.get("commit", lab.commit) for row in measured["runs"]}),
        "device": describe(torch.device(lab.devices[0] if protocol.arms else "cpu")),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hours": round((time.process_time() - started + seconds) / 3600, 3),
    }
    file = results / f"{claim.name}.json"
    content = read_json(file, dict) if file.exists() else {}
    content[scale] = {"environment": environment, "protocol": asdict(protocol), "measured": measured}
    write_atomically(file, json.dumps(content) + "\n")


def read_entries(claims: Mapping[str, Claim], results: Path) -> list[Entry]:
    """The claims that were measured at their first scale. Raises ValueError if one had other rules."""
    entries, trained = [], {}  # p-values of trained claims, also of those that were not run
    for claim in claims.values():
        file = results / f"{claim.name}.json"
        content = read_json(file, dict) if file.exists() else {}
        judged = {}
        for scale, protocol in claim.protocols.items():
            if scale in content:
                same = content[scale]["environment"]["protocol"] == claim.hash(scale)
                require(same, f"{file} was measured with other rules at scale {scale}; run the claim again")
                judged[scale] = judge(claim, protocol, content[scale]["measured"])
        first, protocol = next(iter(claim.protocols.items()))
        if protocol.arms:
            trained[claim.name] = judged[first].p if first in judged else 1.0
        if first in judged:
            entries.append(Entry(claim, content, judged))
    corrected = dict(zip(trained, holm(list(trained.values())), strict=True))
    return [replace(entry, p=corrected.get(entry.claim.name)) for entry in entries]
