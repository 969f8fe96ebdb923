"""Self-contained HTML pages of text and figures."""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from config import as_text
from files import Json, write_atomically

WIDTH = 5.5  # inches of a figure: the text of a paper is as wide, and letters are large enough on a phone
Plot = Any  # a figure of matplotlib
Style = dict[str, Any]  # keywords of matplotlib, for a line or a legend
# Colors follow the browser's light or dark theme. Wide tables scroll below their first column; a shadow says so.
STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 80rem; margin: auto; padding: 1rem; overflow-wrap: anywhere; }
h1, p, pre, img { max-width: 46rem; } h1 { font-size: 1.6rem; }
table, figure { display: block; overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
table { background: linear-gradient(270deg, Canvas 2rem, #0000 4rem) local, linear-gradient(270deg, #888, #0000 2rem); }
td + td { white-space: nowrap; } :is(td, th):first-child { position: sticky; left: 0; background: Canvas padding-box; }
th, td { padding: 0.2rem 0.6rem 0.2rem 0; border-bottom: 1px solid #8886; text-align: left; vertical-align: top; }
th { vertical-align: bottom; } td:first-child:nth-last-child(n + 11) ~ td { white-space: normal; }
pre { padding: 0.6rem; border: 1px solid #8886; font-size: 0.85rem; white-space: pre-wrap; }
img { display: block; width: 100%; background: white; }
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


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def preformatted(text: str) -> str:
    """HTML of text as it is, such as a sample or a command. Long lines wrap."""
    return f"<pre>{escape(text)}</pre>"


def new_plot(height: float, layout: Any = "constrained") -> Plot:
    """A figure so many inches high."""
    from matplotlib.figure import Figure  # imported here because it takes half a second

    return Figure(figsize=(WIDTH, height), layout=layout)


def figure(plot: Plot, alt: str) -> str:
    """A matplotlib figure as SVG in an `img`, inverted in the dark theme. `alt` says in words what it shows."""
    data = base64.b64encode(image_of(plot, "svg")).decode()
    return f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{escape(alt)}"></figure>'


def details(title: str, content: str) -> str:
    """HTML that opens with a click on `title`."""
    return f"<details><summary>{escape(title)}</summary>\n{content}\n</details>"


def save_plot(plot: Plot, path: Path) -> None:
    """Write a plot as PNG, SVG or PDF, as the path ends. Raises OSError, naming the file, if the disk is full."""
    write_atomically(path, image_of(plot, path.suffix[1:]))


def image_of(plot: Plot, kind: str) -> bytes:
    """A plot as a "png", "svg" or "pdf" file."""
    from matplotlib import rc_context

    image = io.BytesIO()
    # SVG has the same bytes for the same plot. Publishers refuse the default fonts of PDF, type 3.
    with rc_context({"svg.hashsalt": "normal-llama", "pdf.fonttype": 42}):
        plot.savefig(image, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return image.getvalue()


def settings_list(values: Json) -> str:
    """HTML: a line per setting."""
    return preformatted("\n".join(f"{name}: {as_text(value)}" for name, value in values.items()))
