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
from experiments.claims.judge import ALPHA, NOT_REPRODUCED, REPRODUCED, UNDECIDED, Judgment, judge
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
        """At the first scale, which it names."""
        scale, first = next(iter(self.judgments.items()))
        found = first.verdict if self.p is None or self.p < ALPHA else UNDECIDED
        return f"{found} at {scale}" if found in (REPRODUCED, NOT_REPRODUCED) else found


def run_claim(claim: Claim, scale: str, lab: Lab, results: Path) -> None:
    """Measure a claim at a scale, and add it to its results."""
    protocol, started = claim.protocols[scale], time.process_time()
    measured = (train if protocol.arms or not claim.measure else claim.measure)(protocol, lab)
    seconds = sum(row.get("seconds") or 0 for row in measured["runs"] + measured.get("search", []))
    environment = {
        "protocol": claim.hash(scale),
        "commits": sorted({row.get("commit") or lab.commit or "unknown" for row in measured["runs"]}),
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
    """The commit of this code, marked if code differs from it. None outside a clone."""
    git = ["git", "-C", str(Path(__file__).parents[2])]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "*.py", "*.c"], capture_output=True, text=True).stdout
    return head + "-dirty" * bool(changed) or None


def read_entries(claims: Mapping[str, Claim], results: Path) -> list[Entry]:
    """The claims that were measured at their first scale. Raises ValueError if one had other rules."""
    entries, trained = [], {name for name, claim in claims.items() if next(iter(claim.protocols.values())).arms}
    for claim in claims.values():
        file = results / f"{claim.name}.json"
        found = load_json(file) if file.exists() else {}
        content = {scale: found[scale] for scale in claim.protocols if scale in found}
        for scale, made in content.items():
            if made["environment"]["protocol"] != claim.hash(scale):
                raise ValueError(f"{file} was measured with other rules at scale {scale}; run the claim again")
        if next(iter(claim.protocols)) in content:
            judged = {scale: judge(claim, claim.protocols[scale], made["measured"]) for scale, made in content.items()}
            entries.append(Entry(claim, content, judged))
    p_values = dict.fromkeys(trained, 1.0)  # also of those that were not run or are undecided
    p_values |= {entry.claim.name: next(iter(entry.judgments.values())).p or 1.0 for entry in entries}
    corrected = dict(zip(trained, holm([p_values[name] for name in trained]), strict=True))
    return [replace(entry, p=corrected.get(entry.claim.name)) for entry in entries]
