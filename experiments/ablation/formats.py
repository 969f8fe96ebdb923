"""Tables as text: Markdown, LaTeX, CSV."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}
LATEX |= {"±": r"$\pm$", "×": r"$\times$", "–": "--", "<": "$<$", "†": r"\textdagger{}"}


@dataclass(frozen=True)
class Table:
    """Cells are text, in which `**` surrounds what is bold."""

    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]


def to_markdown(table: Table) -> str:
    lines = [table.titles, ["---"] * len(table.titles), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_latex(table: Table) -> str:
    """A `table` environment, which needs the package booktabs."""
    lines = [" & ".join(map(_to_latex, cells)) + r" \\" for cells in (table.titles, *table.rows)]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_to_latex(table.caption)}}}",
            rf"\begin{{tabular}}{{{'l' * len(table.titles)}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _to_latex(text: str) -> str:
    escaped = "".join(LATEX.get(character, character) for character in text)
    escaped = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", escaped)
    return re.sub(r"(?<![\w.])-(?=\d)", "$-$", escaped)  # a minus sign, not a hyphen


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """CSV with a header. All rows have the same keys."""
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
