"""A loss, gradient, weight or logit that is NaN or infinite ends the run with exit code 5 and is never saved."""

import itertools
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import sampling as sampler
import train
from machine.process import NotFinite
from model import Llama
from runtime.checkpoint import list_checkpoints
from runtime.run_dir import read_rows
from tests.robustness.conftest import before_step

EVERY = "--schedule constant --warmup 0 --save-every 4 --keep 9 --eval-every 100"


def spoil(trainer: train.Trainer, what: str, patch: pytest.MonkeyPatch) -> None:
    """Make the loss, one gradient, one weight or one running statistic NaN or infinite from now on."""
    weight = next(weight for weight in trainer.model.parameters() if weight.ndim == 2)
    if what == "loss":
        patch.setattr(trainer, "objective", lambda *batch: {"train_loss": trainer.model.loss(*batch) * math.nan})
    elif what == "gradient":
        weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    elif what == "weight":
        weight.data[0, 0] = math.nan
    else:
        trainer.model.get_buffer("layers.1.mlp_residual.norm.running_var")[3] = math.nan


@pytest.mark.parametrize("what", ["loss", "gradient", "weight", "running statistic"])
@pytest.mark.parametrize("at, dtype", [(1, "float32"), (8, "float16")])
def test_the_run_ends_and_saves_nothing_bad(what, at, dtype, flags, tmp_path, ends, monkeypatch):
    """It names the step. In float16 the scaler first reduces the loss scale until it is 1."""
    if what == "running statistic":
        flags = [*flags, "--norm", "batchnorm"]  # its output in training does not depend on them
    steps = "60" if (what, dtype) == ("gradient", "float16") else "20"
    with before_step(at, lambda trainer: spoil(trainer, what, monkeypatch)):
        code, error = ends(train.main, [*flags, *EVERY.split(), "--steps", steps, "--dtype", dtype])
    if (what, dtype) == ("gradient", "float16"):
        at += 16  # the scale starts at 2**16
    due = at if what != "running statistic" else -(-at // 4) * 4  # noticed when the weights are checked
    assert code == 5 and f"not finite at step {due}" in error.splitlines()[-1]
    assert read_rows(tmp_path / "run/metrics.jsonl")[-1] == {"step": due, "not_finite": True}
    saved = list_checkpoints(tmp_path / "run")
    assert [path.name for path in saved] == [f"step-{step:06d}" for step in range(4, at, 4)]
    for path in saved:
        assert all(tensor.isfinite().all() for tensor in load_file(path / "model.safetensors").values())


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("value, ahead", [(math.nan, "cuda"), (math.inf, "cuda"), (math.nan, "cpu")])
def test_no_token_is_drawn_from_logits_that_are_not_finite(sampling, value, ahead, monkeypatch):
    monkeypatch.setattr(sampler, "AHEAD", ahead)
    monkeypatch.setattr(sampler, "start_reading", lambda x: x.clone().tolist)
    model, calls = Llama(dim=16, layers=1, heads=1, context=16, vocab_size=11), itertools.count()

    def next_logits(model: Llama, *args: Any) -> Tensor:
        logits = model.logits(model.hidden(*args)[:, -1]).clone()
        if next(calls) == 2:
            logits[1, 4] = value
        return logits

    monkeypatch.setattr(Llama, "next_logits", next_logits)
    with pytest.raises(NotFinite, match="logit of the model is not finite"):
        sampler.generate(model, torch.tensor([[1, 2], [3, 4], [5, 6]]), tokens=8, **sampling)
