"""Results of claims: a JSON file and a figure for each, and CLAIMS.md and claims.html, generated from them."""

import dataclasses
import json
import platform
import time
from html import escape
from pathlib import Path
from typing import Any

import torch

from experiments.claims.claim import NOT_RUN, SCALES, Claim, Judgment, Lab, Measured, Protocol, Scale
from experiments.statistics import holm
from runtime.device import describe
from runtime.page import figure, markdown, page
from runtime.run_dir import write_atomically

TITLE = "Claims about normalization"
INTRODUCTION = """\
Papers and articles say these things about normalization. Each claim here has a protocol, a rule that turns
measurements into a verdict, and a command. Protocols and rules were written before the runs; they are in
`experiments/claims/`, one file per claim. `python ablate.py claims --report` makes this page from the results.

Changed after first results, and measured anew: claim 1 has 20 other seeds, because 8 were inconclusive; claims 4 and 17
train longer, because post-norm had learned only the frequencies of the bytes, and rates were selected on noise; claims
18 and 20 got their init, embedding and alphas for the first of these reasons, and claim 18 also asks whether Derf loses
with Muon. A review of the first results changed the rules of claims 14 and 16, and no verdict. In claims 18 and 20
RMSNorm gets the init of DyT and Derf, although its own is better by about 0.03 nats.

A verdict is *confirmed*, *refuted* or *inconclusive at this scale*. Scales: *quick* is exact, or about initialization,
and takes seconds; *cpu* trains models of about 0.2 million parameters (claim 5: up to 2.6 million) on at most 0.8
million tokens; *gpu* trains 10 to 30 million parameters. Claims about training have at least 5 seeds, the same for
every arm; other seeds select the learning rates, unless the rule says otherwise. If losses are averaged and a reported
run diverged, the claim is inconclusive. ± is a 95% interval (Student's t). p is corrected for the comparisons within a
claim by Holm's method, and in the last column for all claims of this table. Verdicts follow from the former, so some
may not survive the latter. What holds for a small model and few tokens may fail for a large model, and the reverse."""


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
        "jobs": lab.jobs,
        "seconds": round(time.monotonic() - started),  # less where finished runs were reused
    }
    content = {"environment": environment, "protocol": dataclasses.asdict(protocol), "measured": measured}
    write_atomically(file, json.dumps(content, indent=1) + "\n")
    measured = read_results(results, claim, lab.scale)["measured"]
    draw(claim, measured, file)
    return claim.judge(measured)


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


# --- CLAIMS.md and claims.html ---------------------------------------------------------------------------------------


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


def to_markdown(entries: list[Entry], results: str = "results") -> str:
    """CLAIMS.md. `results` is the path of the results as seen from it."""
    parts = [f"# {TITLE}", INTRODUCTION, summary(entries)]
    for claim, mine in by_claim(entries):
        parts.append(f'## <a name="{claim.name}"></a>{claim.number}. {claim.statement}')
        parts += about(claim)
        for entry in mine:
            parts += findings(entry)
            if entry.content:
                parts.append(f"![{claim.statement}]({results}/{entry.scale}/claims/{claim.name}.png)")
    return "\n\n".join(parts) + "\n"


def to_html(entries: list[Entry]) -> str:
    """claims.html: the same, with the figures inside."""
    sections = [markdown(INTRODUCTION), markdown(summary(entries))]
    for claim, mine in by_claim(entries):
        sections.append(f'<h2 id="{claim.name}">{claim.number}. {escape(claim.statement)}</h2>')
        sections += [markdown(text) for text in about(claim)]
        for entry in mine:
            sections += [markdown(text) for text in findings(entry)]
            if entry.content:
                sections.append(figure(claim.plot(entry.content["measured"]), claim.statement))
    return page(TITLE, sections)


def by_claim(entries: list[Entry]) -> list[tuple[Claim, list[Entry]]]:
    claims = {entry.claim.name: entry.claim for entry in entries}
    return [(claim, [entry for entry in entries if entry.claim is claim]) for claim in claims.values()]


def summary(entries: list[Entry]) -> str:
    """The table of all verdicts, in Markdown."""
    lines = [
        "| # | claim | published | ours | verdict | scale | p | p over all claims |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        claim, judgment = entry.claim, entry.judgment
        cells = [
            f"[{claim.number}](#{claim.name})",
            claim.statement,
            claim.published,
            judgment.ours,
            f"*{entry.verdict}*",
            entry.scale,
            format_p(judgment.p),
            format_p(entry.p_over_all),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def about(claim: Claim) -> list[str]:
    return [f"Source: {claim.source}. Published: {claim.published}.", f"Rule: {claim.rule}"]


def findings(entry: Entry) -> list[str]:
    """The verdict at one scale, why, and how to repeat it."""
    repeat = f"`{entry.command}`, about {duration(entry.claim.protocols[entry.scale].minutes)}."
    if not entry.content:
        return [f"**{entry.scale}: {entry.verdict}**", repeat]
    environment = entry.content["environment"]
    return [
        f"**{entry.scale}: {entry.verdict}**",
        f"{entry.judgment.ours}: {entry.judgment.reason}.",
        f"{repeat} Measured on {environment['device']}, {environment['instruction_set']}, "
        f"torch {environment['torch']}.",
    ]


def duration(minutes: float) -> str:
    if minutes < 1:
        return f"{60 * minutes:g} seconds"
    return f"{minutes:g} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"


def format_p(p: float | None) -> str:
    return "–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.4f}"
