"""What a run leaves to look at: its loss curve, its residual stream, and a page."""

import shlex
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from files import write_atomically
from pages.html import Plot, Style, details, figure, new_plot, page, paragraph, preformatted, save_plot, settings_list
from runtime.run_dir import SAMPLE_HEADING, Row, read_rows, read_run_file, read_samples


def plot_loss(rows: list[Row], gzip_bpb: float | None) -> Plot:
    """Training and validation loss over the steps of a `metrics.jsonl`, next to gzip's bits per byte, if it is known.

    The left axis is in nats per token. Once there is an evaluation in bits per byte, the right axis shows these for the
    validation text. It is exact for the validation loss and for gzip; training text may have other bytes per token.
    """
    plot = new_plot(3.6, layout=None)  # a layout engine takes twice as long
    plot.subplots_adjust(left=0.12, right=0.88, bottom=0.14, top=0.9)
    axes = plot.subplots()
    for name, style in (("train_loss", "-"), ("val_loss", "o-")):
        logged = [row for row in rows if name in row]
        axes.plot([row["step"] for row in logged], [row[name] for row in logged], style, label=name)
    if logged and logged[-1]["val_bpb"]:  # evaluations, which all have the same tokens
        bpb_per_nat = logged[-1]["val_bpb"] / logged[-1]["val_loss"]
        if gzip_bpb:
            axes.axhline(gzip_bpb / bpb_per_nat, color="0.4", linestyle="--", label="gzip -9, validation text")
        right = axes.secondary_yaxis("right", functions=(lambda nats: nats * bpb_per_nat, lambda b: b / bpb_per_nat))
        right.set_ylabel("bits per byte of validation text")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize="small")  # above the curves
    return plot


def plot_streams(arms: Mapping[str, list[Row]], styles: Mapping[str, Style] = {}) -> Plot:
    """RMS of the residual stream after each sublayer, at the first and the last step of each arm's `watch.jsonl`."""
    from matplotlib.ticker import MaxNLocator

    plot = new_plot(3.2)
    first, last = plot.subplots(1, 2, sharey=True)
    for arm, rows in arms.items():
        streams = defaultdict(list)  # by step
        for row in rows:
            if "stream_after" in row:
                streams[row["step"]].append(row["stream_after"])
        for axes, step in ((first, min(streams)), (last, max(streams))):
            values = np.array(streams[step], float)  # None becomes NaN
            style = {"markersize": 4, "markevery": len(values) // 10 + 1} | styles.get(arm, {})
            axes.plot(np.arange(1, len(values) + 1) / 2, values, label=arm, **style)  # a block has two sublayers
    for axes, name in ((first, "first step"), (last, "last step")):
        axes.set_title(name, fontsize="medium")
        axes.set(xlabel="block", yscale="log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    first.set_ylabel("residual stream, RMS")
    return plot


def write_page(folder: Path, gzip_bpb: float | None) -> None:
    """Write `loss.png` and `report.html` of a run."""
    run, rows = read_run_file(folder / "run.json"), read_rows(folder / "metrics.jsonl")
    last = next((row for row in reversed(rows) if "val_bpb" in row or "not_finite" in row), {})
    result = f"Diverged: loss, gradient or weight not finite at step {last['step']}." if last else "Not evaluated yet."
    if "val_bpb" in last:
        bpb = last["val_bpb"]
        needs = f"{bpb:.4f} bits per byte" if bpb else f"{last['val_loss']:.4f} nats per token"
        result = f"After {last['step']} steps the model needs {needs} of the validation text"
        if bpb and gzip_bpb:
            than = f"than gzip -9 on the validation text ({gzip_bpb:.4f})"
            result += f", {abs(1 - bpb / gzip_bpb):.0%} {'better' if bpb < gzip_bpb else 'worse'} {than}"
        result += "."
    plot = plot_loss(rows, gzip_bpb)
    save_plot(plot, folder / "loss.png")
    sections = [
        paragraph(result),
        paragraph(f"{run['parameters']:,} parameters, on {run['device']}."),
        figure(plot, alt=f"Loss over steps. {result}"),
    ]
    if watched := read_rows(folder / "watch.jsonl"):
        streams = figure(plot_streams({"": watched}), alt="RMS of the residual stream over depth")
        sections += ["<h2>Inside the model</h2>", streams]
    sections += [
        "<h2>Samples, which continue the beginning of the validation text</h2>",
        preformatted("".join(SAMPLE_HEADING.format(step) + text for step, text in read_samples(folder)[-20:])),
        preformatted(shlex.join(["python", *run.get("resumed", [run])[-1]["command"]])),
        details("Settings", settings_list(run["resolved"] | run["versions"])),
    ]
    write_atomically(folder / "report.html", page(f"Run {folder.name}", sections))
