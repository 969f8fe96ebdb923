"""What a run leaves to look at: its loss curve, and a self-contained HTML page of Markdown and figures."""

import base64
import io
import re
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import as_text
from files import write_atomically
from runtime.run_dir import SAMPLE_HEADING, read_rows, read_run_file, read_samples

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colors follow the browser's light or dark theme, those of figures too. Wide tables scroll on their own.
STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 64rem; margin: auto; padding: 1rem; overflow-wrap: anywhere; }
table, figure { display: block; overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid #8886; text-align: left; vertical-align: top; }
pre { padding: 0.6rem; border: 1px solid #8886; font-size: 0.85rem; white-space: pre-wrap; }
img { display: block; max-width: 100%; background: white; }
@media (prefers-color-scheme: dark) { img { filter: invert(0.93) hue-rotate(180deg); } }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """The page with `title` as its heading. `sections` are HTML, as the functions below return it."""
    body = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}</style>
<h1>{escape(title)}</h1>
{body}
</html>
"""


def preformatted(text: str) -> str:
    """HTML of text as it is, such as a sample or a command. Long lines wrap."""
    return f"<pre>{escape(text)}</pre>"


def figure(plot: "Figure", alt: str) -> str:
    """A matplotlib figure as SVG in an `img`. `alt` says in words what it shows. On a phone, a wide one scrolls."""
    from matplotlib import rc_context  # imported here because it takes half a second

    svg = io.BytesIO()
    with rc_context({"svg.hashsalt": "normal-llama"}):  # the same bytes for the same plot
        plot.savefig(svg, format="svg", metadata={"Date": None})
    data = base64.b64encode(svg.getvalue()).decode()
    least = f"min-width: {52 * plot.get_figwidth():.0f}px"  # 6.8 inches fill a phone
    return f'<figure><img style="{least}" src="data:image/svg+xml;base64,{data}" alt="{escape(alt)}"></figure>'


def folded(title: str, content: str) -> str:
    """HTML that opens with a click on `title`."""
    return f"<details><summary>{escape(title)}</summary>\n{content}\n</details>"


def markdown(text: str) -> str:
    """HTML of the headings, paragraphs, tables, `code` and **bold** of Markdown."""
    return "\n".join(_block(block) for block in re.split(r"\n\s*\n", text.strip()))


def _block(block: str) -> str:
    if heading := re.fullmatch(r"(#+) (.*)", block):
        level = len(heading[1])
        return f"<h{level}>{_inline(heading[2])}</h{level}>"
    if not block.startswith("|"):
        return f"<p>{_inline(block)}</p>"
    titles, _, *rows = ([_inline(cell.strip()) for cell in line.split("|")[1:-1]] for line in block.splitlines())
    lines = [f"<tr><th>{'</th><th>'.join(titles)}</th></tr>"]
    lines += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows]
    return "\n".join(["<table>", *lines, "</table>"])


def _inline(text: str) -> str:
    def tagged(found: re.Match) -> str:
        return f"<code>{found[1]}</code>" if found[1] else f"<strong>{found[2]}</strong>"

    return re.sub(r"`([^`]+)`|\*\*([^`]+?)\*\*", tagged, escape(text))


def plot_loss(rows: list[dict[str, Any]], gzip_bpb: float) -> "Figure":
    """Training and validation loss over the steps of a `metrics.jsonl`, next to gzip's bits per byte.

    The left axis is in nats per token. Once there is an evaluation, the right axis shows bits per byte of the
    validation text. It is exact for the validation loss and for gzip; training text may have other bytes per token.
    """
    from matplotlib.figure import Figure  # imported here because it takes half a second

    plot = Figure(figsize=(6.4, 4.2))
    plot.subplots_adjust(left=0.11, right=0.89, bottom=0.12, top=0.97)  # a layout engine takes twice as long
    axes = plot.subplots()
    for name, style in (("train_loss", "-"), ("val_loss", "o-")):
        logged = [row for row in rows if name in row]
        axes.plot([row["step"] for row in logged], [row[name] for row in logged], style, label=name)
    if logged:  # evaluations, which all have the same tokens
        bpb_per_nat = logged[-1]["val_bpb"] / logged[-1]["val_loss"]
        axes.axhline(gzip_bpb / bpb_per_nat, color="0.4", linestyle="--", label="gzip -9, whole validation text")
        right = axes.secondary_yaxis("right", functions=(lambda nats: nats * bpb_per_nat, lambda b: b / bpb_per_nat))
        right.set_ylabel("bits per byte of validation text")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    return plot


def save_plot(plot: "Figure", path: Path) -> None:
    """Write a plot as PNG. Raises OSError, naming the file, if the disk is full."""
    image = io.BytesIO()
    plot.savefig(image, format="png", dpi=120)
    write_atomically(path, image.getvalue())


def write_report(folder: Path, gzip_bpb: float) -> None:
    """Write `report.html` of a run that has ended."""
    run, rows = read_run_file(folder / "run.json"), read_rows(folder / "metrics.jsonl")
    last = next(row for row in reversed(rows) if "val_bpb" in row or "not_finite" in row)
    result = f"Diverged: loss, gradient or weight not finite at step {last['step']}."
    if "val_bpb" in last:
        bpb, than = last["val_bpb"], f"than gzip -9 on the whole validation text ({gzip_bpb:.4f})"
        change = f"{abs(1 - bpb / gzip_bpb):.0%} {'better' if bpb < gzip_bpb else 'worse'} {than}"
        result = f"After {last['step']} steps the model needs {bpb:.4f} bits per byte of the validation text, {change}."
    sections = [
        markdown(f"{result}\n\n{run['parameters']:,} parameters, on {run['device']}."),
        figure(plot_loss(rows, gzip_bpb), alt=f"Loss over steps. {result}"),
    ]
    if watched := read_rows(folder / "watch.jsonl"):
        from runtime.watch import plot_watch  # only with --watch

        maps = figure(plot_watch({"": watched}), alt="Heat maps of watch.jsonl over steps and depth")
        sections += ["<h2>Inside the model</h2>", maps]
    sections += [
        "<h2>Samples, which continue the beginning of the validation text</h2>",
        preformatted("".join(SAMPLE_HEADING.format(step) + text for step, text in read_samples(folder)[-20:])),
        preformatted(shlex.join(["python", *run["command"]])),
        folded("Settings", settings_list(run["resolved"] | run["versions"])),
    ]
    write_atomically(folder / "report.html", page(f"Run {folder.name}", sections))


def settings_list(values: dict[str, Any]) -> str:
    """HTML: a line per setting."""
    return preformatted("\n".join(f"{name}: {as_text(value)}" for name, value in values.items()))
