"""Results of claims: a JSON file and a figure for each."""

import dataclasses
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from experiments.claims.claim import NOT_RUN, SCALES, Claim, Judgment, Lab, Measured, Protocol, Scale
from experiments.statistics import holm
from files import write_atomically
from runtime.device import describe


def results_file(results: Path, claim: Claim, scale: Scale) -> Path:
    return results / scale / "claims" / f"{claim.name}.json"


def run_claim(claim: Claim, lab: Lab, results: Path) -> Judgment:
    """Measure a claim at the lab's scale, and write its results and its figure. Returns the verdict."""
    protocol = claim.protocols[lab.scale]
    started = time.monotonic()
    measured = claim.measure(protocol, lab)
    file = results_file(results, claim, lab.scale)
    file.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        "device": describe(torch.device(lab.device)),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "jobs": lab.jobs,
        "seconds": round(time.monotonic() - started),  # less where finished runs were reused
    }
    content = {"environment": environment, "protocol": dataclasses.asdict(protocol), "measured": measured}
    write_atomically(file, json.dumps(content, indent=1) + "\n")
    measured = read_results(results, claim, lab.scale)["measured"]
    draw(claim, measured, file)
    return claim.judge(measured)


def commit() -> str | None:
    """The commit of this code, marked if files differ from it. None without git or outside a clone."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, errors="replace")
    except OSError:
        return None
    return done.stdout.strip() or None


def draw(claim: Claim, measured: Measured, file: Path) -> None:
    """Write the figure of a results file."""
    claim.plot(measured).savefig(file.with_suffix(".png"), dpi=110)


def read_results(results: Path, claim: Claim, scale: Scale) -> dict[str, Any]:
    """What `run_claim` wrote. Raises ValueError if it is damaged, or if the protocol has changed since."""
    file = results_file(results, claim, scale)
    again = f"run python ablate.py claim {claim.name} --scale {scale} again"
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON; {again}") from error
    if not isinstance(content, dict) or not content.keys() >= {"environment", "protocol", "measured"}:
        raise ValueError(f"{file} is not the result of a claim; {again}")
    if {**content["protocol"], "minutes": 0} != as_json(dataclasses.replace(claim.protocols[scale], minutes=0)):
        raise ValueError(f"{file} was measured with another protocol; {again}")
    return content


def as_json(protocol: Protocol) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(protocol)))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A claim at one scale."""

    claim: Claim
    scale: Scale
    judgment: Judgment
    p_over_all: float | None
    content: dict[str, Any]  # of the results file; empty if not run

    @property
    def verdict(self) -> str:
        return self.judgment.verdict + ("" if self.content else ": not run")

    @property
    def command(self) -> str:
        return f"python ablate.py claim {self.claim.name} --scale {self.scale}"


def read_entries(claims: dict[str, Claim], results: Path) -> list[Entry]:
    """Every claim at every scale that it has a protocol for."""
    found: list[tuple[Claim, Scale, Judgment, dict[str, Any]]] = []
    for claim in claims.values():
        for scale in SCALES:
            if scale in claim.protocols:
                done = results_file(results, claim, scale).exists()
                content = read_results(results, claim, scale) if done else {}
                found.append((claim, scale, claim.judge(content["measured"]) if done else NOT_RUN, content))
    corrected = holm([judgment.p for _, _, judgment, _ in found])
    return [
        Entry(claim, scale, judgment, p, content)
        for (claim, scale, judgment, content), p in zip(found, corrected, strict=True)
    ]
