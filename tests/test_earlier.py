"""A run that an earlier commit trained, kept as files in tests/earlier/COMMIT: what still works and what is refused."""

import json
import shutil
from pathlib import Path

import torch

import train
from runtime.checkpoint import load_pretrained

EARLIER = Path(__file__).parent / "earlier/b246c92"
EXPECTED = json.loads((EARLIER / "expected.json").read_text())  # computed at that commit, the logits in float64


def test_its_checkpoint_has_the_same_ids_and_logits():
    model, tokenizer = load_pretrained(EARLIER)
    ids = EXPECTED["ids"]
    assert [tokenizer.encode(text) for text in EXPECTED["texts"]] == ids
    assert [tokenizer.decode(each) for each in ids] == EXPECTED["texts"]
    with torch.no_grad():
        logits = model.double()(torch.tensor(ids[:1]))[0, -1, ::10]
    expected = torch.tensor(EXPECTED["every_tenth_of_the_last_logits"], dtype=torch.float64)
    # The rotary table is in fp32, whose last bit may differ between C libraries.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def test_its_run_is_refused_in_one_line(tmp_path, refused, text):
    """Its text was split by another rule: it would be trained on what was its validation text."""
    shutil.copytree(EARLIER, tmp_path / "run")
    said = refused(train.main, f"--resume --out {tmp_path}/run --data {text}".split())
    assert "is of another version (format 1, not 3); commit b246c92b927e can read it" in said
