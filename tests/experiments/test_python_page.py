"""docs/pre-and-post.md and docs/python.md: every block runs, in order."""

import re
import shlex
import shutil
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import ablate
from norms import KINDS, TRAITS
from train import train

DOCS = Path(__file__).parents[2] / "docs"
STUDENTS, PAGE = ((DOCS / name).read_text("utf-8") for name in ("pre-and-post.md", "python.md"))


def test_every_block_of_both_pages_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for table in (KINDS, TRAITS):  # without the norm that the page registers, when the test ends
        monkeypatch.setitem(table, "maxnorm", None)
        del table["maxnorm"]
    (command,) = re.findall(r"^python ablate.py ([^`]+)```", STUDENTS, re.M)
    options, asked = ablate.parse(shlex.split(command.replace("\\\n", "")))
    asked |= {"layers": 2, "dim": 16, "steps": 20, "eval_tokens": 64, "data": [DOCS / "python.md"], "device": "cpu"}
    for placement in options.placements:
        train(**asked | {"placement": placement, "out": f"{asked['out']}/cells/{placement}-lr0.003-seed0"})
    arms = Path(shutil.copytree(DOCS.parent / "results/readme-ablation", "runs/readme"), "arms.csv")
    arms.write_text(arms.read_text().replace("\nqwen3", "\nqk_norm 5%"))
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", STUDENTS + PAGE, re.M | re.S):
        exec(compile(block, "docs", "exec"), names)
    rows = r"gemma3 & 1.8644 & -0.0400 & 0.0126 & 0.0034 \\qk\_norm 5\% & 1.8679 & "
    assert "".join(names["lines"][2:]).startswith(rows)
    assert Path("pre-and-post.png").exists() and len(names["gradients"]) == 2
    assert names["losses"][-1] < names["losses"][0] - 1
    prompt, ids = names["tokenizer"].encode("def "), names["ids"].tolist()
    assert ids[: len(prompt)] == prompt and len(ids) == len(prompt) + 50
    trained, loaded = (names[name].state_dict() for name in ("model", "loaded"))
    assert trained.keys() == loaded.keys() and all(trained[name].equal(loaded[name]) for name in trained)
    assert type(names["other"].layers[0].mlp_residual.norm) is names["MaxNorm"]
    (q, k), maps = names["seen"], names["maps"]
    identity = torch.eye(maps.shape[-1]).expand_as(maps)  # with these values, attention returns its weights
    torch.testing.assert_close(maps, scaled_dot_product_attention(q, k, identity, is_causal=True))
