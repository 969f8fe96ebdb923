"""The page and the loss curve of a run."""

import base64
import re

import numpy as np
import pytest

import train
from pages.html import image_of
from pages.run import plot_loss, write_page
from runtime.run_dir import Log, read_run_file, write_run_file

pytestmark = pytest.mark.pictures

# A token has 2.5 bytes: 4 nats per token are 4 / ln 2 / 2.5 = 2.308 bits per byte.
ROWS = [
    {"step": 10, "train_loss": 6.0},
    {"step": 20, "train_loss": 5.0},
    {"step": 20, "val_loss": 4.5, "val_bpb": 4.5 * 0.577078},
    {"step": 30, "train_loss": 4.5},
    {"step": 30, "val_loss": 4.0, "val_bpb": 4.0 * 0.577078},
]


def test_loss_is_drawn_in_nats_and_gzip_where_its_bits_per_byte_are():
    (axes,) = (plot := plot_loss(ROWS, gzip_bpb=2.0)).axes
    train_line, val_line, gzip = (np.asarray(line.get_xydata()).tolist() for line in axes.lines)
    assert train_line == [[10, 6.0], [20, 5.0], [30, 4.5]]
    assert val_line == [[20, 4.5], [30, 4.0]]
    assert [y for _, y in gzip] == pytest.approx([2.0 / 0.577078] * 2)
    for row in ({"not_finite": True}, {"val_loss": 4.5, "val_bpb": None}):  # without an evaluation, or in nats alone
        assert len(plot_loss([ROWS[0], {"step": 15} | row], gzip_bpb=2.0).axes[0].lines) == 2
    assert image_of(plot, "svg") == image_of(plot, "svg"), "its bytes do not depend on when it is drawn"
    assert b"/Type3" not in image_of(plot, "pdf"), "publishers refuse such fonts"


def test_the_page_of_a_run_loads_nothing_and_says_what_was_run_and_what_came_out(tmp_path):
    """Of a text with characters that HTML must escape, and a name that is not UTF-8."""
    (tmp_path / "a b.txt").write_text("the <cat> sees &amp; a bird.\n" * 300)
    sizes = "--dim 16 --layers 1 --heads 2 --context 16 --tokenizer bytes --device cpu --dtype float32 --steps 2"
    run = tmp_path / "run"
    places = ["--data", str(tmp_path / "a b.txt"), "--cache-dir", str(tmp_path / "cache"), "--out", str(run)]
    train.main([*sizes.split(), *places, "--watch=1"])
    html = (run / "report.html").read_text("utf-8")
    tags = re.findall(r"<(\w+)", html)
    assert tags.count("h1") == 1 and not {"script", "link", "iframe", "object"} & set(tags)
    assert html.count("<img") == html.count('src="data:') == html.count("alt=") >= 1
    assert re.search("<h2>Inside the model</h2>\n<figure><img ", html)
    assert not re.search(r"url\(|@import|@font-face| on\w+=", html)
    described = read_run_file(run / "run.json") | {"device": "<fast>", "command": ["train.py", "--data", "b \udcfc"]}
    write_run_file(tmp_path / "run.json", described)
    log = Log(tmp_path, 0, lambda row: None)
    for step in range(1, 24):
        log.add_sample(step, f"text {step}. if a < b: café")
    for row in ROWS:
        log.add(**row)
    needs = "After 30 steps the model needs 2.3083 bits per byte of the validation text"
    for gzip_bpb, than in ((2.5, "8% better"), (2.0, "15% worse")):
        write_page(tmp_path, gzip_bpb)
        html = (tmp_path / "report.html").read_text("utf-8")
        assert f"{needs}, {than} than gzip -9 on the validation text ({gzip_bpb:.4f})." in html
    loss = base64.b64encode(image_of(plot_loss(ROWS, gzip_bpb=2.0), "svg")).decode()
    assert f'<img src="data:image/svg+xml;base64,{loss}" alt="Loss over steps. {needs}' in html
    assert f"{described['parameters']:,} parameters, on &lt;fast&gt;." in html
    assert r"python train.py --data &#x27;b \udcfc&#x27;" in html and "tie_embeddings: true" in html
    assert re.findall(r"text (\d+)\. if a &lt; b: café", html) == [str(step) for step in range(4, 24)]
    resumed = [{"command": ["a"]}, {"command": ["train.py", "--resume"]}]
    write_run_file(tmp_path / "run.json", described | {"resumed": resumed})
    log.add(step=31, not_finite=True)
    write_page(tmp_path, gzip_bpb=2.0)
    html = (tmp_path / "report.html").read_text("utf-8")
    assert "Diverged: loss, gradient or weight not finite at step 31." in html
    assert "<pre>python train.py --resume</pre>" in html, "the command that ran last"
