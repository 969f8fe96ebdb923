"""A self-contained HTML page of text, tables and figures. It loads nothing from elsewhere and runs no script.

page("Title", [markdown("Some **text**."), table(["run", "loss"], rows), figure(plot, alt="Loss over steps.")])
"""

import base64
import io
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colors follow the reader's light or dark theme; figures keep a white ground. What is wide scrolls in its own box.
STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 0.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; margin-bottom: 0; }
p { overflow-wrap: anywhere; }
.table, pre, figure { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid #8886; text-align: left; white-space: nowrap; }
pre { padding: 0.6rem; border: 1px solid #8886; border-radius: 0.3rem; font-size: 0.85rem; }
pre.wrapped { white-space: pre-wrap; overflow-wrap: anywhere; }
img { display: block; max-width: max(100%, 34rem); background: white; }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """The page with `title` as its heading. `sections` are HTML, as the functions below return it."""
    body = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def preformatted(text: str, wrapped: bool = False) -> str:
    """Text as it is, such as a sample or a command. Long lines scroll, or break if `wrapped`."""
    return f'<pre class="wrapped">{escape(text)}</pre>' if wrapped else f"<pre>{escape(text)}</pre>"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Titles and cells are plain text."""
    return _table([escape(title) for title in titles], [[escape(cell) for cell in row] for row in rows])


def figure(plot: "Figure", alt: str) -> str:
    """A matplotlib figure as SVG in an `img`, so that names inside one figure cannot clash with another's.

    `alt` says in words what the figure shows. The same figure gives the same bytes.
    """
    from matplotlib import rc_context  # imported here because it takes half a second

    svg = io.BytesIO()
    with rc_context({"svg.hashsalt": "normal-llama"}):
        plot.savefig(svg, format="svg", metadata={"Date": None})
    data = base64.b64encode(svg.getvalue()).decode()
    return f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{escape(alt)}"></figure>'


def markdown(text: str) -> str:
    """HTML of the Markdown in our reports: headings, paragraphs, tables, `code`, **bold**, *italic* and
    [links](address)."""
    return "\n".join(_block(block) for block in re.split(r"\n\s*\n", text.strip()))


def _block(block: str) -> str:
    if heading := re.fullmatch(r"(#+) (.*)", block):
        level = len(heading[1])
        return f"<h{level}>{_inline(heading[2])}</h{level}>"
    if block.startswith("|"):
        lines = [re.split(r"\s*\|\s*", line.strip())[1:-1] for line in block.splitlines()]
        titles, _, *rows = ([_inline(cell) for cell in line] for line in lines)
        return _table(titles, rows)
    return f"<p>{_inline(block)}</p>"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="table"><table>\n<thead>{line(titles, "th")}</thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _inline(text: str) -> str:
    parts = re.split(r"`([^`]+)`", escape(text))
    return "".join(f"<code>{part}</code>" if i % 2 else _emphasis(part) for i, part in enumerate(parts))


def _emphasis(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"\*(\S.*?)\*", r"<em>\1</em>", text)
    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)
