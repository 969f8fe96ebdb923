"""A run that an earlier commit trained, kept as files in tests/earlier/COMMIT: what still works and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from runtime.checkpoint import load_pretrained, save_pretrained

EARLIER = Path(__file__).parent / "earlier/b246c92"
EXPECTED = json.loads((EARLIER / "expected.json").read_text())  # computed at that commit, the logits in float64


@pytest.mark.parametrize("directory", [EARLIER, EARLIER / "checkpoints/step-000006"])
def test_its_checkpoint_has_the_same_ids_and_logits(directory):
    model, tokenizer = load_pretrained(directory)
    ids = EXPECTED["ids"]
    assert [tokenizer.encode(text) for text in EXPECTED["texts"]] == ids
    assert [tokenizer.decode(each) for each in ids] == EXPECTED["texts"]
    with torch.no_grad():
        logits = model.double()(torch.tensor(ids[:1]))[0, -1, ::10]
    expected = torch.tensor(EXPECTED["every_tenth_of_the_last_logits"], dtype=torch.float64)
    # The rotary table is in fp32, whose last bit may differ between C libraries.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def test_its_checkpoint_is_exported(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = load_pretrained(EARLIER)
    save_pretrained(tmp_path / "exported", model, tokenizer)
    for directory in (tmp_path / "exported", EARLIER / "checkpoints/step-000006"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).double()
        tokens = torch.tensor(EXPECTED["ids"][:1])
        with torch.no_grad():  # their norms compute in fp32
            torch.testing.assert_close(theirs(tokens).logits, model.double()(tokens), rtol=0, atol=1e-5)
        in_transformers = transformers.AutoTokenizer.from_pretrained(directory)
        assert in_transformers(EXPECTED["texts"][0])["input_ids"] == EXPECTED["ids"][0]
