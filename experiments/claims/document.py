"""CLAIMS.md and claims.html, generated from the results of all claims."""

from html import escape
from typing import Any

from experiments.claims.claim import Claim
from experiments.claims.results import Entry
from runtime.report import figure, markdown, page

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
        f"torch {environment['torch']}{made_at(environment)}.",
    ]


def made_at(environment: dict[str, Any]) -> str:
    """The commit that made a result. Results of earlier versions lack it."""
    return f", commit {environment['commit']}" if environment.get("commit") else ""


def duration(minutes: float) -> str:
    if minutes < 1:
        return f"{60 * minutes:g} seconds"
    return f"{minutes:g} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"


def format_p(p: float | None) -> str:
    return "–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.4f}"
