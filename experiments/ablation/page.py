"""The plots of an ablation, and `report.html`: its tables, plots, samples and settings on one page."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict

import torch
from matplotlib.figure import Figure

from experiments.ablation.grid import Cell, Grid, Settings
from experiments.ablation.outcome import Outcome, by_arm
from experiments.ablation.plots import plot_curves, plot_differences, plot_paired_curves, plot_sweep
from files import write_atomically
from model import Llama
from runtime.report import figure, markdown, page, preformatted, save_plot, settings_table
from runtime.run_dir import last_sample


def write_pictures(grid: Grid, shared: Sequence[Outcome], best: Sequence[Outcome], sweep: Sequence[Outcome]) -> None:
    """Write the plots, and `report.html` with them and `table.md`, into the folder of `grid`.

    The outcomes are of the runs that have ended: those at the shared learning rate, each arm's at its best one, and
    those that selected it. Lists may be empty, and nothing is compared before the first arm has a run.
    """
    figures: dict[str, Figure] = {}

    def add(name: str, alt: str, plot: Figure) -> None:
        save_plot(plot, grid.folder / f"{name}.png")
        figures[alt] = plot

    baseline = next(iter(grid.settings))
    for suffix, lr, runs in (("", "the same learning rate", shared), ("-best", "each at its best learning rate", best)):
        if not any(run.arm == baseline for run in runs):
            continue
        runs = sorted(runs, key=lambda run: list(grid.settings).index(run.arm))
        title = plot_title(grid.settings, runs, lr)
        if len(by_arm(runs)) > 1:
            add(f"differences{suffix}", f"Paired differences from the first arm, {lr}", plot_differences(runs, title))
            add(f"paired-curves{suffix}", f"Paired differences over the steps, {lr}", plot_paired_curves(runs, title))
        add(f"curves{suffix}", f"Losses over the steps, {lr}", plot_curves(runs, title))
    if sweep:
        title = plot_title(grid.settings, sweep, "selection of the learning rate")
        add("sweep", "val_bpb against the learning rate", plot_sweep(list(sweep), title))
    cells = [Cell(run.arm, run.lr, run.seed) for run in shared]
    tables = (grid.folder / "table.md").read_text("utf-8")
    write_atomically(grid.folder / "report.html", ablation_page(grid, cells, tables, figures))


def ablation_page(grid: Grid, cells: Iterable[Cell], tables: str, figures: Mapping[str, Figure]) -> str:
    """The page of an ablation. `tables` is `table.md`; `figures` are by what they show, in words.

    It has the last sample of the first of each arm's `cells`, and the settings of the first arm.
    """
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.arm.name, cell)
    samples = {name: last_sample(grid.cell_folder(cell)) for name, cell in first.items()}
    model_config, config = next(iter(grid.settings.values()))
    sections = [
        markdown(tables),
        "<h2>Plots</h2>",
        *(figure(plot, alt) for alt, plot in figures.items()),
        "<h2>Samples after training</h2>",
        *(f"{markdown(f'### {name}')}{preformatted(text)}" for name, text in samples.items() if text),
        "<h2>Settings</h2>",
        "<p>Of the first arm. The others have their own values of what is compared, and each run its own seed.</p>",
        settings_table(asdict(model_config) | asdict(config)),
    ]
    return page(f"Ablation {grid.folder.name}", sections)


def plot_title(settings: Settings, runs: Iterable[Outcome], lr: str) -> str:
    """What was run: model size, steps, learning rate and seeds."""
    with torch.device("meta"):
        models = [Llama(model_config, seed=0) for model_config, _ in settings.values()]
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in models]
    steps = [config.steps for _, config in settings.values()]
    seeds = {run.seed for run in runs}
    return f"{_range(sizes, ',')} parameters, {_range(steps)} steps, {lr}, seed{'s' * (len(seeds) > 1)} {_range(seeds)}"


def _range(values: Collection[int], spec: str = "") -> str:
    low, high = min(values), max(values)
    return f"{low:{spec}}" if low == high else f"{low:{spec}} to {high:{spec}}"
