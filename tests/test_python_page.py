"""docs/python.md: every block runs, in order."""

import re
from pathlib import Path

from norms import KINDS, TRAITS

PAGE = Path(__file__).parents[1] / "docs/python.md"


def test_every_block_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for table in (KINDS, TRAITS):  # without the norm that the page registers, when the test ends
        monkeypatch.setitem(table, "maxnorm", None)
        del table["maxnorm"]
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S):
        exec(compile(block, PAGE, "exec"), names)
    assert names["losses"][-1] < names["losses"][0] - 1
    prompt, ids = names["tokenizer"].encode("def "), names["ids"].tolist()
    assert ids[: len(prompt)] == prompt and len(ids) == len(prompt) + 50
    trained, loaded = (names[name].state_dict() for name in ("model", "loaded"))
    assert trained.keys() == loaded.keys() and all(trained[name].equal(loaded[name]) for name in trained)
    assert type(names["other"].layers[0].mlp_residual.norm) is names["MaxNorm"]
