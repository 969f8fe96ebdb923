"""CLAIMS.md, claims.html and their figures. `page.md` has all prose, and a comment where each result goes."""

import math
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from experiments.ablation.outcome import grouped
from experiments.ablation.plots import LINES
from experiments.ablation.report import NONE, table
from experiments.claims.claim import Effect
from experiments.claims.judge import Entry
from experiments.statistics import Estimate
from files import write_atomically
from runtime.report import figure, markdown, page, save_plot

TITLE = "Claims about normalization, at a small scale"


def write_pages(entries: list[Entry], results: Path) -> None:
    """Write a figure for each claim to `results`, which is in a folder `results`, and both pages beside that."""
    introduction, *sections = Path(__file__).with_name("page.md").read_text("utf-8").split("\n\n## ")
    known = {entry.claim.name: entry for entry in entries}
    rows, text, html = [], [], []
    for section in sections:
        title, _, prose = section.partition("\n")
        prose, _, name = prose.strip().removesuffix(" -->").partition("<!-- ")
        if entry := known.get(name):
            published = " ".join(prose.partition("Published:")[2].partition("\n\n")[0].split())
            rows.append([title, f"**{entry.verdict}**", primary(entry), published])
            content = f"## {title}\n\n{prose.strip()}\n\n{details(entry)}"
            drawn = plot(entry)
            save_plot(drawn, results / f"{name}.png")
            text += [content, f"![{name}]({results.parent.name}/{results.name}/{name}.png)"]
            html += [markdown(content), figure(drawn, alt=f"effect and rates: {title}")]
    verdicts = table(["claim", "verdict", "primary effect", "published"], rows)
    introduction = introduction.replace("<!-- TABLE -->", verdicts)
    top = results.parent.parent
    write_atomically(top / "CLAIMS.md", "\n\n".join([f"# {TITLE}", introduction, *text]) + "\n")
    write_atomically(top / "claims.html", page(TITLE, [markdown(introduction), *html]))


def primary(entry: Entry) -> str:
    """The judged effects at each scale."""
    return "; ".join(
        f"{effect.label}, {scale}: {shown(effect, judgment.found[effect.name])}"
        for scale, judgment in entry.judgments.items()
        for effect in entry.claim.effects
        if effect.judged and effect.name in judgment.found
    )


def details(entry: Entry) -> str:
    """Verdict, effects, and how they were measured, in Markdown."""
    p = "" if entry.p is None else f" (p = {entry.p:.3g}, corrected for all trained claims)"
    rules = [
        f"{each.label}: reproduced inside {bounds(each, each.reproduced)}, not reproduced outside "
        f"{bounds(each, each.expected)}."
        for each in entry.claim.effects
        if each.judged
    ]
    rows = []
    made = [f"`python ablate.py claim {entry.claim.name}`."]
    for scale, judgment in entry.judgments.items():
        for effect in entry.claim.effects:
            if found := judgment.found.get(effect.name):
                least = NONE if isinstance(found, str) or effect.ratio else f"{found.detectable:.2g}"
                rows.append([effect.label, scale, shown(effect, found), least])
        by = entry.content[scale]["environment"]
        search = entry.content[scale]["measured"].get("search", [])
        commits = sorted({*by["commits"], *(row["commit"] for row in search)})
        alone = "" if entry.p is None else " before the correction"
        made.append(
            f"{scale}: {judgment.verdict}{alone}; {by['hours']:.2g} hours, {by['device']}, {by['instruction_set']}, "
            f"commits {', '.join(commits)}, protocol {by['protocol']}."
        )
    titles = ["effect", "scale", "mean ± 95% interval", "detectable"]
    return "\n\n".join([f"**{entry.verdict}**{p}. {' '.join(rules)}", table(titles, rows), " ".join(made)])


def bounds(effect: Effect, region: tuple[float, float]) -> str:
    low, high = map(math.exp, region) if effect.ratio else region
    return f"[{low:.3g}, {high:.3g}]".replace("inf", "∞")


def shown(effect: Effect, found: Estimate | str) -> str:
    """`+0.0123 ± 0.0045 (n = 12)`, or `0.96 [0.95, 0.98] (n = 10)` for a ratio, or why there is nothing."""
    if isinstance(found, str):
        return found
    if effect.ratio:
        middle, low, high = map(math.exp, (found.mean, found.low, found.high))
        return f"{middle:#.3g} [{low:#.3g}, {high:#.3g}] (n = {found.n})"
    return f"{found:+.3g} (n = {found.n})"


# --- the figure of a claim --------------------------------------------------------------------------------------------


def plot(entry: Entry) -> Figure:
    """The upper panel has the primary effect at every scale, or the effects that have a place of their own."""
    claim = entry.claim
    curves = rate_curves(entry)
    figure = Figure(figsize=(7, 7 if curves else 3.5), layout="constrained")
    upper, *others = figure.subplots(2 if curves else 1, squeeze=False)[:, 0]
    trend = [each for each in claim.effects if each.x] or claim.effects[:1]
    if not trend[0].ratio:
        upper.axhline(0, color="0.4", linewidth=1)
    if claim.dashed is not None:
        upper.axhline(claim.dashed, color="C1", linestyle="--", label="published")
        upper.legend()
    for place, judgment in enumerate(entry.judgments.values()):
        for effect in trend:
            if isinstance(found := judgment.found.get(effect.name), Estimate):
                low, middle, high = (math.exp(y) if effect.ratio else y for y in (found.low, found.mean, found.high))
                upper.errorbar(effect.x or place, middle, [[middle - low], [high - middle]], fmt="oC0", capsize=4)
            elif found:
                upper.text(effect.x or place, 0, found, ha="center", va="bottom", size="small")
    upper.set(xlabel=claim.over, ylabel=claim.across or trend[0].label)
    if claim.over:
        upper.set(xscale="log", yscale="log" if trend[0].ratio else "linear", xticks=[each.x for each in trend])
        upper.xaxis.set(major_formatter="{x:,.0f}", minor_locator=NullLocator())
    else:
        upper.set_xticks(range(place + 1), entry.judgments)
        upper.set_xlim(-0.5, place + 0.5)
    for axes in others:
        for number, (label, points) in enumerate(curves.items()):
            at = grouped(points)
            style = f"C{number}{LINES[number // 10 % 4]}"
            axes.plot(sorted(at), [mean(at[lr]) for lr in sorted(at)], style, linewidth=1, label=label)
            axes.plot(*zip(*points, strict=True), f"oC{number}", ms=3)
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss (nats per token)")
        axes.xaxis.set(major_locator=LogLocator(subs=(1, 3)), major_formatter="{x:g}", minor_locator=NullLocator())
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def rate_curves(entry: Entry) -> dict[str, list[tuple[float, float]]]:
    """By arm and scale, of the arms with several rates: the rate and the loss of each run that ended."""
    runs = []
    for scale in entry.judgments:
        measured = entry.content[scale]["measured"]
        for row in measured["runs"] + measured.get("search", []):
            if "lr" in row and row["value"]:
                runs.append((f"{row['arm']}, {scale}", (row["lr"], row["value"])))
    return {label: points for label, points in grouped(runs).items() if len(dict(points)) > 1}
