"""Markdown to HTML, as much of it as a report has."""

import re
from html import escape


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
