"""Results of claims: a JSON file and a figure for each."""

import json
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.claims.claim import OPEN, SCALES, Claim, Judgment, Scale
from experiments.claims.judge import judge
from experiments.claims.measure import Lab
from experiments.claims.plot import plot
from files import write_atomically
from runtime.device import describe
from runtime.report import save_plot


@dataclass(frozen=True)
class Entry:
    """A claim at one scale."""

    claim: Claim
    scale: Scale
    content: Mapping[str, Any]  # of the results file; empty if not run
    judgment: Judgment


def results_file(results: Path, claim: Claim, scale: Scale) -> Path:
    return results / scale / "claims" / f"{claim.name}.json"


def command(claim: Claim, scale: Scale) -> str:
    return f"python ablate.py claim {claim.name} --scale {scale}"


def run_claim(claim: Claim, scale: Scale, lab: Lab, results: Path) -> Judgment:
    """Measure a claim, and write its results and its figure. Returns the verdict."""
    protocol = claim.protocols[scale]
    started = time.monotonic()
    measured = claim.measure(protocol, lab)
    environment = {
        "command": command(claim, scale),
        "commit": commit(),
        "device": describe(torch.device(lab.devices[0])),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "jobs": lab.jobs,
        "seconds": round(time.monotonic() - started),  # less where finished runs were reused
    }
    content = {"environment": environment, "protocol": asdict(protocol), "measured": measured}
    file = results_file(results, claim, scale)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(content, indent=1) + "\n")
    entry = read_entry(results, claim, scale)
    draw(entry, results)
    return entry.judgment


def commit() -> str | None:
    """The commit of this code, marked if files differ from it. None without git or outside a clone."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, errors="replace")
    except OSError:
        return None
    return done.stdout.strip() or None


def draw(entry: Entry, results: Path) -> None:
    """Write the figure of a result next to it."""
    figure = plot(entry.claim, entry.claim.protocols[entry.scale], entry.content["measured"])
    save_plot(figure, results_file(results, entry.claim, entry.scale).with_suffix(".png"))


def read_entry(results: Path, claim: Claim, scale: Scale) -> Entry:
    """Raises ValueError if the result is damaged, or was measured with another protocol."""
    file, protocol = results_file(results, claim, scale), claim.protocols[scale]
    again = f"run {command(claim, scale)} again"
    if not file.exists():
        return Entry(claim, scale, {}, Judgment(OPEN, "–", "not run"))
    try:
        content = json.loads(file.read_text("utf-8"))
        made, runs = content["protocol"], content["measured"]["runs"]
        same = made["flags"] == protocol.flags and made["lrs"] == list(protocol.lrs)
        same &= {row["seed"] for row in runs} == set(protocol.seeds)
        same &= all(any(row["arm"] in variants for row in runs) for variants in protocol.arms.values())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged; {again}") from error
    if not same:
        raise ValueError(f"{file} was measured with another protocol; {again}")
    return Entry(claim, scale, content, judge(claim, protocol, content["measured"]))


def read_entries(claims: Mapping[str, Claim], results: Path) -> list[Entry]:
    """Every claim at every scale that it has a protocol for."""
    return [
        read_entry(results, claim, scale) for claim in claims.values() for scale in SCALES if scale in claim.protocols
    ]
