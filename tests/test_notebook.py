"""examples/norms.ipynb: its cells run in order, and what it says about its figures is true."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples/norms.ipynb"
CELLS = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_outputs_are_committed_and_the_text_repeats_their_numbers(tmp_path):
    """Without the checkout, the first cell says how to get it."""
    shown = " ".join("".join(output.get("text", output.get("data"))) for cell in CODE for output in cell["outputs"])
    assert all(cell["outputs"] for cell in CODE) and NOTEBOOK.stat().st_size < 150_000
    assert not re.search(r"(?<!\w)(/|[A-Z]:)\w+[/\\]|widget", shown)  # no absolute paths, no progress bars
    assert all(n in shown for cell in CELLS if cell not in CODE for n in re.findall(r"\d\.\d\d", str(cell["source"])))
    done = subprocess.run([sys.executable, "-c", "".join(CODE[0]["source"])], cwd=tmp_path, capture_output=True)
    assert done.returncode == 1 and b"The checkout is missing" in done.stderr and b"\n!git clone " in done.stderr


@pytest.mark.slow
def test_the_cells_run_and_their_claims_hold(tmp_path, monkeypatch):
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    names: dict = {}
    exec("import matplotlib\nmatplotlib.use('Agg')\n" + "\n".join("".join(cell["source"]) for cell in CODE), names)
    (pre, grown), (first, last) = ([names["streams"][name, step] for step in (1, 200)] for name in ("pre", "sandwich"))
    assert max(pre) < 1.2 * pre[0] and all(map(float.__lt__, pre[1:] + grown[1:], first[1:] + last[1:]))
    assert all(abs(rms / k**0.5 - 1) < 0.1 for k, rms in enumerate(first[1:], 1)) and grown[-1] > 3 * grown[0]
    assert last[-1] > 1.1 * max(names["gains"]) * first[-1]  # more than gains explain
