"""CLAIMS.md, claims.html and their figures. `page.md` has all prose, and a comment where each result goes."""

from operator import itemgetter
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from experiments.ablation.outcome import grouped
from experiments.ablation.plots import LINES
from experiments.ablation.report import NONE, table
from experiments.claims.claim import Effect
from experiments.claims.judge import Entry, Found
from experiments.statistics import Estimate
from files import write_atomically
from runtime.report import figure, markdown, page, save_plot

TITLE = "Claims about normalization, at a small scale"
RESULTS = Path("results", "claims")


def write_pages(entries: list[Entry], out: Path) -> None:
    """Write both pages to `out`, and a figure for each claim to `out`/results/claims."""
    introduction, *sections = Path(__file__).with_name("page.md").read_text("utf-8").split("\n\n## ")
    known = {entry.claim.name: entry for entry in entries}
    rows, text, html = [], [], []
    for section in sections:
        title, _, prose = section.partition("\n")
        prose, _, name = prose.strip().removesuffix(" -->").partition("<!-- ")
        if entry := known.get(name):
            primary = [
                f"{effect.name}, {scale}: {shown(effect, found)}"
                for scale, judgment in entry.judgments.items()
                for effect, found in judgment.found
                if effect.judged
            ]
            published = " ".join(prose.partition("Published:")[2].partition("\n\n")[0].split())
            rows.append([title, f"**{entry.verdict}**", "; ".join(primary), published])
            content = f"## {title}\n\n{prose.strip()}\n\n{details(entry)}"
            drawn = plot(entry)
            save_plot(drawn, out / RESULTS / f"{name}.png")
            text += [content, f"![{name}]({RESULTS.as_posix()}/{name}.png)"]
            html += [markdown(content), figure(drawn, alt=f"effect and rates: {title}")]
    verdicts = table(["claim", "verdict", "primary effect", "published"], rows)
    introduction = introduction.replace("<!-- TABLE -->", verdicts)
    write_atomically(out / "CLAIMS.md", "\n\n".join([f"# {TITLE}", introduction, *text]) + "\n")
    write_atomically(out / "claims.html", page(TITLE, [markdown(introduction), *html]))


def details(entry: Entry) -> str:
    """Verdict, effects, and how they were measured, in Markdown."""
    p = "" if entry.p is None else f" (p = {entry.p:.3g}, corrected for all trained claims of this page)"
    rules = [
        f"{effect.name}: reproduced inside {bounds(effect, effect.reproduced)}, not reproduced outside "
        f"{bounds(effect, effect.expected)}."
        for effect in entry.claim.effects
        if effect.judged
    ]
    rows = []
    made = [f"`python ablate.py claim {entry.claim.name}`."]
    for scale, judgment in entry.judgments.items():
        for effect, found in judgment.found:
            least = NONE if isinstance(found, str) or effect.ratio else f"{found.detectable:.2g}"
            rows.append([effect.name, scale, shown(effect, found), least])
        by = entry.content[scale]["environment"]
        made.append(
            f"{scale}: {judgment.verdict}{'' if entry.p is None else ' before the correction'}; {by['hours']:.2g} "
            f"hours, {by['device']}, {by['instruction_set']}, commits {', '.join(by['commits'])}, protocol "
            f"{by['protocol']}."
        )
    titles = ["effect", "scale", "mean ± 95% interval", "detectable"]
    return "\n\n".join([f"**{entry.verdict}**{p}. {' '.join(rules)}", table(titles, rows), " ".join(made)])


def bounds(effect: Effect, region: tuple[float, float]) -> str:
    low, high = effect.scaled(*region)
    return f"[{low:.3g}, {high:.3g}]".replace("inf", "∞")


def shown(effect: Effect, found: Found) -> str:
    """`+0.0123 ± 0.0045 (n = 12)`, or `0.96 [0.95, 0.98] (n = 10)` for a ratio, or why there is nothing."""
    if isinstance(found, str):
        return found
    if effect.ratio:
        middle, low, high = effect.scaled(found.mean, found.low, found.high)
        return f"{middle:#.3g} [{low:#.3g}, {high:#.3g}] (n = {found.n})"
    return f"{found:+.3g} (n = {found.n})"


# --- the figure of a claim --------------------------------------------------------------------------------------------


def plot(entry: Entry) -> Figure:
    """The primary effect at every scale, or the effects that have a place of their own; below it, losses by rate."""
    claim, curves = entry.claim, rate_curves(entry)
    figure = Figure(figsize=(7, 7 if curves else 3.5), layout="constrained")
    upper, *others = figure.subplots(2 if curves else 1, squeeze=False)[:, 0]
    trend = [each for each in claim.effects if each.x] or claim.effects[:1]
    for place, judgment in enumerate(entry.judgments.values()):
        for effect, found in judgment.found:
            x = effect.x or place
            if effect in trend and isinstance(found, Estimate):
                middle, low, high = effect.scaled(found.mean, found.low, found.high)
                upper.errorbar(x, middle, [[middle - low], [high - middle]], fmt="oC0", capsize=4)
            elif effect in trend:
                upper.text(x, 0, found, ha="center", va="bottom", size="small")
    if not trend[0].ratio:
        upper.axhline(0, color="0.4", linewidth=1)
    if claim.dashed is not None:
        upper.axhline(claim.dashed, color="C1", linestyle="--", label="published")
        upper.legend()
    upper.set(xlabel=claim.over, ylabel=claim.across or trend[0].name)
    if claim.over:
        upper.set(xscale="log", yscale="log" if trend[0].ratio else "linear", xticks=[each.x for each in trend])
        upper.xaxis.set(major_formatter="{x:,.0f}", minor_locator=NullLocator())
        upper.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    else:
        upper.set_xticks(range(place + 1), entry.judgments)
        upper.set_xlim(-0.5, place + 0.5)
    for axes in others:
        for number, (label, losses) in enumerate(curves.items()):
            style = f"C{number}{LINES[number // 10 % 4]}"
            axes.plot(losses.keys(), [mean(group) for group in losses.values()], style, linewidth=1, label=label)
            for lr, group in losses.items():
                axes.plot([lr] * len(group), group, f"oC{number}", ms=3)
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss (nats)")
        axes.xaxis.set(major_locator=LogLocator(subs=(1, 3)), major_formatter="{x:g}", minor_locator=NullLocator())
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def rate_curves(entry: Entry) -> dict[str, dict[float, list[float]]]:
    """The losses of the runs that ended, by arm and scale and by rate, of the arms with several rates."""
    runs = []
    for scale in entry.judgments:
        measured = entry.content[scale]["measured"]
        rows = [row for row in measured["runs"] + measured.get("search", []) if "lr" in row and row["value"]]
        runs += [(f"{row['arm']}, {scale}", (row["lr"], row["value"])) for row in sorted(rows, key=itemgetter("lr"))]
    curves = {label: grouped(points) for label, points in grouped(runs).items()}
    return {label: losses for label, losses in curves.items() if len(losses) > 1}
