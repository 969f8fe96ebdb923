"""The report of an ablation: its sections in order, written as Markdown, CSV and LaTeX."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.ablation.comparison import ArmResult, Interaction, compare, interactions
from experiments.ablation.costs import at_equal, costs
from experiments.ablation.formats import Table, to_csv, to_latex, to_markdown
from experiments.ablation.grid import SELECTION_SEEDS, Cell, Grid
from experiments.ablation.outcome import Arm, Outcome
from experiments.ablation.tables import (
    EDGE,
    INCOMPLETE,
    aggregates,
    arms_table,
    at_edge,
    costs_table,
    interaction_rows,
    interactions_table,
    lr_table,
    missing,
)
from files import write_atomically
from runtime.device import describe


class Document:
    """A report on the runs that have ended. `compare` and `sweep` append sections."""

    def __init__(
        self, grid: Grid, seeds: Sequence[int], margin: float | None, command: str, outcomes: Mapping[Cell, Outcome]
    ):
        self.grid, self.margin, self.outcomes = grid, margin, outcomes
        self.edges: set[Arm] = set()  # the arms whose best learning rate ends their sweep
        self.blocks: list[str | Table] = [f"`{command}`", self.settings(seeds), self.reading_help()]
        self.arm_rows: list[dict[str, Any]] = []
        self.interaction_rows: list[dict[str, Any]] = []

    def settings(self, seeds: Sequence[int]) -> str:
        configs = [config for _, config in self.grid.settings.values()]
        steps = " or ".join(map(str, sorted({config.steps for config in configs})))
        dtypes = " or ".join(sorted({config.dtype for config in configs}))
        kernels = "with the CPU kernels" if configs[0].fast else "in plain PyTorch"
        jobs, cards = self.grid.jobs * len(self.grid.devices), len(self.grid.devices)
        parallel = f"{jobs} {'run' if jobs == 1 else 'runs'} at a time{f' on {cards} cards' if cards > 1 else ''}"
        return (
            f"{steps} steps, seeds {seeds[0]} to {seeds[-1]}, on {describe(torch.device(configs[0].device))} in "
            f"{dtypes} {kernels}, {parallel}, torch {torch.__version__}."
        )

    def reading_help(self) -> str:
        equivalence = (
            ""
            if self.margin is None
            else f" p of ±{self.margin:g} tests for a difference of at least {self.margin:g} either way (two one-sided "
            "t tests, corrected in the same way): a small one means as good as the baseline."
        )
        return (
            "A statistic is a mean over n seeds ± the half-width of its 95% interval (Student's t). Differences from "
            "the first row are paired: each seed gives both arms the same initial draws and batches. Below zero is "
            "better. p tests for no difference (paired t test), corrected for all comparisons of its table (Holm); "
            f"each interval is for one comparison.{equivalence} A run diverged if its loss was not finite, or ended "
            "above that of a uniform prediction."
        )

    def sweep(self, cells: Sequence[Cell], best: Mapping[Arm, float]) -> None:
        """The learning rates that were tried; `best` is empty before all have ended."""
        table = lr_table("Mean val_bpb by learning rate", cells, self.outcomes, best)
        self.edges = at_edge(cells, best)
        self.blocks += [
            "## Learning rates",
            missing(cells, self.outcomes),
            f"Mean val_bpb on {SELECTION_SEEDS} seeds that are not reported. An arm's best (bold) has the fewest "
            "diverged runs and then the lowest mean.",
            table,
            f"{EDGE}: the best is the lowest or the highest that was tried, so a wider sweep may find a better one "
            "(`--lrs`, or `--widen 3` to try up to three more)."
            if self.edges
            else "",
        ]

    def compare(self, rates: str, title: str, cells: Sequence[Cell]) -> None:
        """A comparison of arms; `rates` names it in the CSV files. Without `cells` it has not started."""
        self.blocks.append(f"## {title}")
        if not cells:
            self.blocks.append("**Partial: not started.** The sweep of learning rates has not ended.")
            return
        edges = self.edges if rates == "best" else set()
        results = compare(cells, self.outcomes, self.margin)
        combined = interactions(cells, self.outcomes)
        tokens, seconds = at_equal("tokens", cells, self.outcomes), at_equal("seconds", cells, self.outcomes)
        spent = costs(cells, self.outcomes, self.grid.settings)
        self.arm_rows += aggregates(rates, results, spent, seconds, edges)
        self.interaction_rows += interaction_rows(rates, combined)
        self.blocks += [
            missing(cells, self.outcomes),
            arms_table(title, results, edges, self.margin),
            comparisons(results),
        ]
        if combined:
            baseline = combined[0].baseline.name
            self.blocks += [
                f"Interactions: how much more (above 0) or less two changes of {baseline} raise val_bpb together than "
                f"the sum of what each does alone. p is corrected for {len(combined)} comparisons.",
                interactions_table(f"Interactions. {title}", combined),
            ]
        if incomplete(results, combined):
            self.blocks.append(
                f"{INCOMPLETE} Not all seeds: with the others, a run diverged or has not ended. The seeds that are "
                "left may be the easy ones, so their mean is not comparable and has no p."
            )
        self.blocks += [
            "Seconds are of a whole run with its evaluations, on a machine that other runs share. The last column is "
            "val_bpb when an arm had trained as long as the fastest arm did in all, linear between evaluations. A "
            "slower arm had not finished its learning rate schedule by then, which counts against it. Diverged runs "
            "are left out.",
            costs_table(f"Costs. {title}", spent, tokens, seconds),
        ]


def comparisons(results: Sequence[ArmResult]) -> str:
    """How many comparisons the p-values of a table are corrected for."""
    others = len(results) - 1
    return f"p is corrected for {others} {'comparison' if others == 1 else 'comparisons'}." if others else ""


def incomplete(results: Sequence[ArmResult], combined: Sequence[Interaction]) -> bool:
    """Whether a table has a statistic that does not rest on all seeds."""
    found = [result.bpb for result in results] + [item.difference for item in combined]
    found += [result.difference for result in results if result.difference]
    return any(0 < finding.n < finding.planned for finding in found)


def write_document(document: Document, folder: Path) -> None:
    """Write `table.md`, `table.tex`, `table.csv` and, with several factors, `interactions.csv`."""
    tables = [block for block in document.blocks if isinstance(block, Table)]
    texts = [to_markdown(block) if isinstance(block, Table) else block for block in document.blocks]
    latex = ["% \\usepackage{booktabs}", *map(to_latex, tables)]
    write_atomically(folder / "table.md", "\n\n".join(filter(None, texts)) + "\n")
    write_atomically(folder / "table.tex", "\n\n".join(latex) + "\n")
    write_atomically(folder / "table.csv", to_csv(document.arm_rows))
    if document.interaction_rows:
        write_atomically(folder / "interactions.csv", to_csv(document.interaction_rows))
