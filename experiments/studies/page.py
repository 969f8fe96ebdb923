"""CLAIMS.md and its figures. `page.md` has all prose, and a comment where each study's results go."""

import math
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure

from experiments.ablation.comparison import Finding
from experiments.ablation.plots import plot_differences
from experiments.ablation.report import NONE, table
from experiments.studies.study import Effect, Region
from experiments.studies.verdict import Entry
from files import write_atomically
from pages.html import save_plot

PROSE = Path(__file__).with_name("page.md")
RESULTS = Path("results", "claims")


def write_page(entries: list[Entry], out: Path) -> None:
    """Write CLAIMS.md to `out`, and a figure for each study to `out`/results/claims."""
    introduction, *sections = PROSE.read_text("utf-8").split("\n\n## ")
    known = {entry.study.name: entry for entry in entries}
    rows, text = [], []
    for section in sections:
        title, prose = section.split("\n\n", 1)
        prose, _, name = prose.strip().removesuffix(" -->").partition("\n\n<!-- ")
        if entry := known.get(name):
            primary = [
                f"{effect.name}, {scale}: {format_effect(effect, finding)}"
                for scale, effect, finding in entry.found
                if effect.reproduced
            ]
            published = " ".join(prose.partition("Published:")[2].partition("\n\n")[0].split())
            rows.append([title, f"**{entry.verdict}**", "; ".join(primary), published])
            text += [f"## {title}", prose, details(entry), f"![{name}]({(RESULTS / name).as_posix()}.png)"]
            save_plot(plot(entry), out / RESULTS / f"{name}.png")
    verdicts = table(["claim", "verdict", "primary effect", "published"], rows)
    text = [introduction.replace("<!-- TABLE -->", verdicts), *text]
    write_atomically(out / "CLAIMS.md", "\n\n".join(text) + "\n")


def details(entry: Entry) -> str:
    """Verdict, effects, and how they were measured, in Markdown."""
    corrected = entry.p is not None
    p = f" (p = {entry.p:.3g}, corrected for all trained claims of this page)" if corrected else ""
    verdict = [f"**{entry.verdict}**{p}."]
    for effect in entry.study.effects:
        if effect.reproduced and effect.expected:
            inside, outside = bounds(effect, effect.reproduced), bounds(effect, effect.expected)
            verdict.append(f"{effect.name}: reproduced inside {inside}, not reproduced outside {outside}.")
    rows = []
    for scale, effect, finding in entry.found:
        least = f"{finding.estimate.detectable:.2g}" if finding.estimate and not effect.ratio else NONE
        rows.append([effect.name, scale, format_effect(effect, finding), least])
    made = [f"`python ablate.py claim {entry.study.name}`."]
    for scale, (found, _) in entry.judged.items():
        by = entry.content[scale]["environment"]
        made.append(
            f"{scale}: {found}{' before the correction' if corrected else ''}; {by['hours']:.2g} hours, "
            f"{by['device']}, {by['instruction_set']}, commits {', '.join(by['commits'])}, protocol {by['protocol']}."
        )
    titles = ["effect", "scale", "mean ± 95% interval", "detectable"]
    return "\n\n".join([" ".join(verdict), table(titles, rows), " ".join(made)])


def bounds(effect: Effect, region: Region) -> str:
    low, high = map(math.exp, region) if effect.ratio else region
    return f"[{low:.3g}, {high:.3g}]".replace("inf", "∞")


def format_effect(effect: Effect, finding: Finding) -> str:
    """`+0.0123 ± 0.0045 (n = 12)`, or `0.96 [0.95, 0.98] (n = 10)` for a ratio, or why there is nothing."""
    found = finding.estimate
    if found is None:
        return "a run diverged or is out of range" if finding.tuned else "no best learning rate was found"
    if effect.ratio:
        middle, low, high = map(math.exp, (found.mean, found.low, found.high))
        return f"{middle:#.3g} [{low:#.3g}, {high:#.3g}] (n = {found.n})"
    return f"{found:+.3g} (n = {found.n})"


def plot(entry: Entry) -> Figure:
    """The effects of the same kind as the first, at every scale."""
    first = entry.study.effects[0]
    found = {
        fill(f"{effect.name}, {scale}", 36): finding
        for scale, effect, finding in entry.found
        if (effect.value, effect.ratio) == (first.value, first.ratio) and finding.estimate
    }
    return plot_differences(found, entry.study.unit)
