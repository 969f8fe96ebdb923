"""The loss curve of a run, by the numbers that it draws, and what its page says."""

import json
import re

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from runtime.report import last_samples, plot_loss, write_report

# A token has 2.5 bytes: 4 nats per token are 4 / ln 2 / 2.5 = 2.308 bits per byte.
ROWS = [
    {"step": 10, "train_loss": 6.0},
    {"step": 20, "train_loss": 5.0},
    {"step": 20, "val_loss": 4.5, "val_bpb": 4.5 * 0.577078},
    {"step": 30, "train_loss": 4.5},
    {"step": 30, "val_loss": 4.0, "val_bpb": 4.0 * 0.577078},
]
RUN = {
    "model": {"norm": "rmsnorm", "norm_args": {"eps": 1e-6}, "dim": 16},
    "training": {"data": ["a.txt", "b c.txt"], "fast": True, "clip": 1.0},
    "parameters": 12345,
    "corpus": {"name": "words"},
    "tokenizer": {"kind": "bytes"},
    "versions": {"python": "3.11.2", "torch": "2.13.0"},
    "device": "a <fast> card",
    "command": ["train.py", "--data", "a.txt", "b c.txt"],
}


def test_loss_is_drawn_in_nats_and_gzip_where_its_bits_per_byte_are():
    plot = plot_loss(ROWS, gzip_bpb=2.0)
    FigureCanvasAgg(plot).draw()
    (axes,) = plot.axes
    train, val, gzip = (np.asarray(line.get_xydata()).tolist() for line in axes.lines)
    assert train == [[10, 6.0], [20, 5.0], [30, 4.5]]
    assert val == [[20, 4.5], [30, 4.0]]
    assert [y for _, y in gzip] == pytest.approx([2.0 / 0.577078] * 2)
    (right,) = axes.child_axes
    assert right.get_ylim() == pytest.approx([0.577078 * nats for nats in axes.get_ylim()])


def test_nothing_is_drawn_outside_the_picture():
    rows = [row | {name: row[name] + 9.001 for name in ("train_loss", "val_loss") if name in row} for row in ROWS]
    for some in (ROWS, rows, rows[2:3]):
        plot = plot_loss(some, gzip_bpb=2.0)
        FigureCanvasAgg(plot).draw()
        box = plot.get_tightbbox()
        assert box.x0 > 0 and box.y0 > 0 and box.x1 < 8 and box.y1 < 4.5


def test_ten_thousand_evaluations_draw_no_more_points_than_a_thousand_and_keep_what_stands_out():
    rows = []
    for step in range(1, 10_001):
        rows.append({"step": step, "train_loss": 5.0 + step % 7, "val_loss": 4.0 + step % 3, "val_bpb": 2.0})
    rows[0]["train_loss"], rows[-1]["train_loss"] = 8.5, 7.5  # neither is an extreme
    rows[1233]["train_loss"], rows[8765]["train_loss"], rows[4320]["val_loss"] = 99.0, 0.5, 50.0
    (axes,) = plot_loss(rows, gzip_bpb=2.0).axes
    train, val, _ = (np.asarray(line.get_xydata()).tolist() for line in axes.lines)
    assert 900 <= len(train) <= 1000 and 900 <= len(val) <= 1000
    assert train == sorted(train) and val == sorted(val)
    assert train[0] == [1, 8.5] and train[-1] == [10_000, 7.5]
    assert [1234, 99.0] in train and [8766, 0.5] in train and [4321, 50.0] in val
    drawn = {(row["step"], row["train_loss"]) for row in rows}
    assert drawn.issuperset(map(tuple, train))
    assert np.diff([step for step, _ in train]).max() < 50  # from everywhere


def test_up_to_a_thousand_points_are_all_drawn():
    rows = [{"step": step, "train_loss": 5.0} for step in range(1, 1001)]
    (axes,) = plot_loss(rows, gzip_bpb=2.0).axes
    assert len(np.asarray(axes.lines[0].get_xdata())) == 1000


def test_without_an_evaluation_there_is_no_second_axis():
    plot = plot_loss([ROWS[0], {"step": 15, "not_finite": True}], gzip_bpb=2.0)
    (axes,) = plot.axes
    assert [np.asarray(line.get_xydata()).tolist() for line in axes.lines] == [[[10, 6.0]], []]
    assert not axes.child_axes


def write_run(folder, rows: list[dict], samples: str | None) -> str:
    (folder / "run.json").write_text(json.dumps(RUN))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if samples is not None:
        (folder / "samples.txt").write_text(samples, "utf-8")
    write_report(folder, gzip_bpb=2.0)
    return (folder / "report.html").read_text("utf-8")


def test_the_page_of_a_run_says_what_was_run_and_what_came_out(tmp_path):
    html = write_run(tmp_path, ROWS, "----- step 30 -----\nif a < b: café\n")
    assert "val_bpb 2.3083 after 30 steps; gzip -9 on the whole validation text: 2.0000 bits per byte." in html
    assert "if a &lt; b: café" in html
    assert "12,345 parameters, on a &lt;fast&gt; card." in html
    assert "python train.py --data a.txt &#x27;b c.txt&#x27;" in html
    for name, value in (("norm_args", "eps=1e-06"), ("data", "a.txt b c.txt"), ("fast", "true"), ("torch", "2.13.0")):
        assert f"<td>{name}</td><td>{value}</td>" in html


def test_the_page_of_a_long_run_shows_its_last_samples_and_says_so():
    note, shown = last_samples("".join(f"----- step {step} -----\ntext {step}.\n" for step in range(1, 10_001)))
    assert note == "<p>The last 20 of 10,000; all are in <code>samples.txt</code>.</p>"
    assert re.findall(r"text (\d+)\.", shown) == [str(step) for step in range(9_981, 10_001)]
    assert re.findall(r"----- step (\d+) -----", shown) == [str(step) for step in range(9_981, 10_001)]


def test_the_page_of_a_run_that_diverged(tmp_path):
    html = write_run(tmp_path, [ROWS[0], {"step": 15, "not_finite": True}], None)
    assert "Diverged: loss, gradient or weight not finite at step 15." in html
