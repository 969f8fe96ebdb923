"""CLAIMS.md, written from the results of all claims. Its prose, and claims of earlier versions, are in `page.md`."""

from itertools import groupby
from pathlib import Path

from experiments.claims.results import Entry, command
from experiments.statistics import holm


def to_markdown(entries: list[Entry], results: str = "results") -> str:
    """CLAIMS.md. `results` is the path of the results as seen from it."""
    page = Path(__file__).with_name("page.md").read_text("utf-8")
    not_run = [f"- {how_to_repeat(entry)}" for entry in entries if not entry.content]
    sections = []
    for claim, mine in groupby(entries, key=lambda entry: entry.claim):
        sections.append(f'### <a name="{claim.name}"></a>{claim.statement}')
        sections.append(f"Source: {claim.source}. Published: {claim.published}.")
        expected = [each.statement for each in claim.comparisons if each.expected != "anything"]
        sections.append(f"{claim.rule} Expected: {'; '.join(expected)}.")
        sections += [finding(entry, results) for entry in mine if entry.content]
    parts = {"TABLE": table(entries), "NOT RUN": "\n".join(not_run), "CLAIMS": "\n\n".join(sections)}
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page


def table(entries: list[Entry]) -> str:
    """The verdicts on what was run, with p-values of each claim and corrected for all claims."""
    lines = ["| claim | verdict | scale | ours | published | p | p over all |", "|---|---|---|---|---|---|---|"]
    done = [entry for entry in entries if entry.content]
    for entry, p_over_all in zip(done, holm([entry.judgment.p for entry in done]), strict=True):
        claim, judgment = entry.claim, entry.judgment
        cells = [f"[{claim.statement}](#{claim.name})", f"*{judgment.verdict}*", entry.scale, judgment.ours]
        cells += [claim.published, format_p(judgment.p), format_p(p_over_all)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def finding(entry: Entry, results: str) -> str:
    """The verdict at one scale, why, and how to repeat it."""
    environment = entry.content["environment"]
    made_at = f", commit {environment['commit']}" if environment.get("commit") else ""  # early results lack it
    return (
        f"**{entry.scale}: {entry.judgment.verdict}** ({entry.judgment.reason}). "
        f"[Figure]({results}/{entry.scale}/claims/{entry.claim.name}.png). "
        f"{how_to_repeat(entry)} Measured on {environment['device']}, {environment['instruction_set']}, "
        f"torch {environment['torch']}{made_at}."
    )


def how_to_repeat(entry: Entry) -> str:
    minutes = entry.claim.protocols[entry.scale].minutes
    duration = f"{60 * minutes:g} seconds" if minutes < 1 else f"{minutes:g} minutes"
    return f"`{command(entry.claim, entry.scale)}`, about {duration}."


def format_p(p: float | None) -> str:
    return "–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.4f}"
