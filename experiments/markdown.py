"""Markdown to HTML, as much of it as a report has."""

import re
from html import escape


def markdown(text: str) -> str:
    """HTML of the headings, paragraphs, tables, `code` and **bold** of Markdown."""
    return "\n".join(_block(block) for block in re.split(r"\n\s*\n", text.strip()))


def _block(block: str) -> str:
    if block.startswith("## "):
        return f"<h2>{_inline(block[3:])}</h2>"
    if not block.startswith("|"):
        return f"<p>{_inline(block)}</p>"
    titles, _, *rows = ([_inline(cell.strip()) for cell in line.split("|")[1:-1]] for line in block.splitlines())
    lines = [f"<tr><th>{'</th><th>'.join(titles)}</th></tr>"]
    lines += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows]
    return "\n".join(["<table>", *lines, "</table>"])


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
