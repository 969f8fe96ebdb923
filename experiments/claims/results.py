"""Results of claims: a JSON file and a figure for each, beside a ledger of all runs."""

import json
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.claims.claim import Claim
from experiments.claims.judge import ALPHA, Judgment, judge
from experiments.claims.measure import Lab, train
from experiments.statistics import holm
from files import load_json, write_atomically
from runtime.device import describe


@dataclass(frozen=True)
class Entry:
    """A claim with its results and what follows from them, by scale, the one of the verdict first."""

    claim: Claim
    content: Mapping[str, Any]
    judgments: Mapping[str, Judgment]
    p: float | None = None  # of the verdict, corrected for all trained claims

    @property
    def verdict(self) -> str:
        first = next(iter(self.judgments.values()))
        return first.verdict if self.p is None or self.p < ALPHA else "undecided"


def run_claim(claim: Claim, scale: str, lab: Lab, results: Path) -> None:
    """Measure a claim at a scale, and add it to its results."""
    protocol, started = claim.protocols[scale], time.process_time()
    measured = (train if protocol.arms or not claim.measure else claim.measure)(protocol, lab)
    seconds = sum(row.get("seconds") or 0 for row in measured["runs"] + measured.get("search", []))
    environment = {
        "protocol": claim.hash,
        "commit": lab.commit,
        "device": describe(torch.device(lab.devices[0])),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hours": round((time.process_time() - started + seconds) / 3600, 3),
    }
    file = results / f"{claim.name}.json"
    content = load_json(file) if file.exists() else {}
    content[scale] = {"environment": environment, "protocol": asdict(protocol), "measured": measured}
    write_atomically(file, json.dumps(content) + "\n")


def commit() -> str | None:
    """The commit of this code, marked if files differ from it. None without git or outside a clone."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, errors="replace")
    except OSError:
        return None
    return done.stdout.strip() or None


def read_entries(claims: Mapping[str, Claim], results: Path) -> list[Entry]:
    """The claims that were measured at their first scale. Raises ValueError if one had another protocol."""
    entries = []
    for claim in claims.values():
        file = results / f"{claim.name}.json"
        found = load_json(file) if file.exists() else {}
        content = {scale: found[scale] for scale in claim.protocols if scale in found}
        for scale, made in content.items():
            same = made["protocol"] == json.loads(json.dumps(asdict(claim.protocols[scale])))
            if not same:
                raise ValueError(f"{file} was measured with another protocol at scale {scale}; run the claim again")
        if next(iter(claim.protocols)) in content:
            judged = {scale: judge(claim, claim.protocols[scale], made["measured"]) for scale, made in content.items()}
            entries.append(Entry(claim, content, judged))
    trained = [entry for entry in entries if next(iter(entry.claim.protocols.values())).arms]
    p_values = [next(iter(entry.judgments.values())).p for entry in trained]
    corrected = holm([1.0 if p is None else p for p in p_values])
    by_name = {entry.claim.name: p for entry, p in zip(trained, corrected, strict=True)}
    return [replace(entry, p=by_name.get(entry.claim.name)) for entry in entries]
