"""Results of claims: a JSON file and a figure for each, and CLAIMS.md, which is generated from them."""

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import torch

from experiments.claims.claim import NOT_RUN, SCALES, Claim, Judgement, Lab, Protocol, Scale
from experiments.statistics import holm
from runtime.device import describe
from runtime.run_dir import write_atomically

INTRODUCTION = """\
# Claims about normalization

Papers and articles say these things about normalization. Each claim here has a protocol, a rule that turns
measurements into a verdict, and a command. Protocols and rules were written before the runs; they are in
`experiments/claims/`, one file per claim. `python ablate.py claims --report` makes this file from `results/`.

A verdict is *confirmed*, *refuted* or *inconclusive at this scale*. Scales: *quick* is exact, or about initialization,
and takes seconds; *cpu* trains models of about 0.2 million parameters on 0.4 million tokens; *gpu* trains 10 to 30
million parameters. Each arm has at least 5 seeds, paired, which did not select its learning rate. ± is a 95% interval
(Student's t). p is corrected for the comparisons within a claim by Holm's method, and in the last column for all claims
of this table. What holds for a small model and few tokens may fail for a large model, and the reverse."""


def results_file(results: Path, claim: Claim, scale: Scale) -> Path:
    return results / scale / "claims" / f"{claim.name}.json"


def run_claim(claim: Claim, lab: Lab, results: Path) -> Judgement:
    """Measure a claim at the lab's scale, and write its results and its figure. Returns the verdict."""
    protocol = claim.protocols[lab.scale]
    measured = claim.measure(protocol, lab)
    file = results_file(results, claim, lab.scale)
    file.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        "device": describe(torch.device(lab.device)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "jobs": lab.jobs,
    }
    content = {"environment": environment, "protocol": dataclasses.asdict(protocol), "measured": measured}
    write_atomically(file, json.dumps(content, indent=1) + "\n")
    measured = read_results(results, claim, lab.scale)["measured"]
    claim.plot(measured).savefig(file.with_suffix(".png"), dpi=110)
    return claim.judge(measured)


def read_results(results: Path, claim: Claim, scale: Scale) -> dict[str, Any]:
    """What `run_claim` wrote. Raises ValueError if the protocol has changed since."""
    file = results_file(results, claim, scale)
    content = json.loads(file.read_text())
    if content["protocol"] != as_json(claim.protocols[scale]):
        raise ValueError(f"{file} was measured with another protocol; run python ablate.py claim {claim.name} again")
    return content


def as_json(protocol: Protocol) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(protocol)))


# --- CLAIMS.md -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
    """A claim at one scale."""

    claim: Claim
    scale: Scale
    judgement: Judgement
    p_over_all: float | None
    environment: dict[str, Any] | None  # None if not run

    @property
    def verdict(self) -> str:
        return self.judgement.verdict + (": not run" if self.environment is None else "")

    @property
    def command(self) -> str:
        return f"python ablate.py claim {self.claim.name} --scale {self.scale}"


def read_entries(claims: dict[str, Claim], results: Path) -> list[Entry]:
    """Every claim at every scale that it has a protocol for."""
    found: list[tuple[Claim, Scale, Judgement, dict | None]] = []
    for claim in claims.values():
        for scale in SCALES:
            if scale in claim.protocols:
                done = results_file(results, claim, scale).exists()
                content = read_results(results, claim, scale) if done else {}
                judgement = claim.judge(content["measured"]) if done else NOT_RUN
                found.append((claim, scale, judgement, content.get("environment")))
    corrected = holm([judgement.p for _, _, judgement, _ in found])
    return [
        Entry(claim, scale, judgement, p, environment)
        for (claim, scale, judgement, environment), p in zip(found, corrected, strict=True)
    ]


def to_markdown(entries: list[Entry], results: str = "results") -> str:
    """CLAIMS.md. `results` is the path of the results as seen from it."""
    lines = [
        INTRODUCTION,
        "",
        "| # | claim | published | ours | verdict | scale | p | p over all claims |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        claim, judgement = entry.claim, entry.judgement
        cells = [
            f"[{claim.number}](#{claim.name})",
            claim.statement,
            claim.published,
            judgement.ours,
            f"*{entry.verdict}*",
            entry.scale,
            format_p(judgement.p),
            format_p(entry.p_over_all),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for entry in entries:
        lines += ["", *section(entry, results, first=entry is next(e for e in entries if e.claim is entry.claim))]
    return "\n".join(lines) + "\n"


def section(entry: Entry, results: str, first: bool) -> list[str]:
    """What there is to say about a claim at one scale; the claim itself only at its first."""
    claim, protocol = entry.claim, entry.claim.protocols[entry.scale]
    lines = []
    if first:
        lines += [f'## <a name="{claim.name}"></a>{claim.number}. {claim.statement}', ""]
        lines += [f"Source: {claim.source}. Published: {claim.published}.", "", f"Rule: {claim.rule}", ""]
    lines += [f"**{entry.scale}: {entry.verdict}**", ""]
    if entry.environment is None:
        return [*lines, f"`{entry.command}`, about {duration(protocol.minutes)}."]
    made_on = f"{entry.environment['device']}, torch {entry.environment['torch']}"
    return [
        *lines,
        f"{entry.judgement.ours}: {entry.judgement.reason}.",
        "",
        f"`{entry.command}`, about {duration(protocol.minutes)}. Measured on {made_on}.",
        "",
        f"![{claim.statement}]({results}/{entry.scale}/claims/{claim.name}.png)",
    ]


def duration(minutes: float) -> str:
    return f"{minutes:g} minutes" if minutes >= 1 else f"{60 * minutes:g} seconds"


def format_p(p: float | None) -> str:
    return "–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.4f}"
