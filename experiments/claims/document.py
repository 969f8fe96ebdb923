"""CLAIMS.md and claims.html, written from the results of all claims. The prose is in `page.md`."""

import math
from pathlib import Path

from experiments.claims.claim import Effect
from experiments.claims.plot import plot
from experiments.claims.results import Entry
from experiments.statistics import Estimate
from files import write_atomically
from runtime.report import figure, markdown, page, save_plot


def write_pages(entries: list[Entry], results: Path) -> None:
    """Write a figure for each claim to `results`, which is in a folder `results`, and both pages beside that."""
    title, _, prose = Path(__file__).with_name("page.md").read_text("utf-8").partition("\n")
    prose = prose.replace("<!-- TABLE -->", table(entries))
    text, html = [title, prose.strip()], [markdown(prose)]
    for entry in entries:
        drawn, name, section = plot(entry), entry.claim.name, "\n\n".join(paragraphs(entry))
        save_plot(drawn, results / f"{name}.png")
        text += [section, f"![{name}]({results.parent.name}/{results.name}/{name}.png)"]
        html += [markdown(section), figure(drawn, alt=f"effect and rates: {entry.claim.title}")]
    top = results.parent.parent
    write_atomically(top / "CLAIMS.md", "\n\n".join(text) + "\n")
    write_atomically(top / "claims.html", page(title.removeprefix("# "), html))


def table(entries: list[Entry]) -> str:
    lines = ["| claim | verdict | effect | published |", "|---|---|---|---|"]
    for entry in entries:
        found = [
            f"{scale}: {shown(effect, judgment.found[effect.name])}"
            for scale, judgment in entry.judgments.items()
            for effect in entry.claim.effects
            if effect.judged and effect.name in judgment.found
        ]
        lines.append(f"| {entry.claim.title} | **{entry.verdict}** | {'; '.join(found)} | {entry.claim.published} |")
    return "\n".join(lines)


def paragraphs(entry: Entry) -> list[str]:
    """The section of a claim, in Markdown."""
    claim, p = entry.claim, "" if entry.p is None else f" (p = {entry.p:.2g}, corrected for all trained claims)"
    rows = ["| effect | scale | mean ± 95% interval | smallest detectable |", "|---|---|---|---|"]
    made = []
    for scale, judgment in entry.judgments.items():
        for effect in (each for each in claim.effects if each.name in judgment.found):
            found = judgment.found[effect.name]
            least = "–" if found.detectable is None or effect.ratio else f"{found.detectable:.2g}"
            rows.append(f"| {effect.name} | {scale} | {shown(effect, found)} | {least} |")
        by = entry.content[scale]["environment"]
        reason = f"{judgment.reason}; " if judgment.reason else ""
        made.append(
            f"{scale}: {reason}{by['hours']:.2g} CPU hours, {by['device']}, {by['instruction_set']}, commit "
            f"{by['commit']}, protocol {by['protocol']}."
        )
    return [
        f"## {claim.title}",
        f"**{entry.verdict}**{p}. “{claim.quote}” ({claim.source}). Published: {claim.published}.",
        claim.question,
        "\n".join(rows),
        f"`python ablate.py claim {claim.name}`. {' '.join(made)}",
    ]


def shown(effect: Effect, found: Estimate) -> str:
    """`+0.0123 ± 0.0045 (n = 12)`, or `0.96 [0.95, 0.98] (n = 10)` for a ratio."""
    if effect.ratio:
        middle, low, high = map(math.exp, (found.mean, found.low, found.high))
        return f"{middle:.3g} [{low:.3g}, {high:.3g}] (n = {found.n})"
    return f"{found:+.3g} (n = {found.n})"
