"""A loss, gradient, weight or logit that is NaN or infinite ends the run with exit code 5 and is never saved."""

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import generate
import train
from machine.process import NotFinite
from model import Llama
from runtime.checkpoint import list_checkpoints

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


@pytest.fixture
def run_spoiled(monkeypatch: pytest.MonkeyPatch, ends: Callable) -> Callable[..., str]:
    """`run_spoiled(flags, what, at)`: the error of a run in which `what` is spoilt in step `at`."""
    train_step = train.Trainer.train_step

    def run(flags: list[str], what: str, at: int) -> str:
        def spoiled(trainer: train.Trainer) -> None:
            if trainer.step + 1 == at:
                spoil(trainer, what, monkeypatch)
            train_step(trainer)

        monkeypatch.setattr(train.Trainer, "train_step", spoiled)
        code, error = ends(train.main, flags)
        assert code == 5
        return error.splitlines()[-1]

    return run


@pytest.mark.parametrize("what", ["loss", "gradient", "weight", "running statistic"])
@pytest.mark.parametrize("at, dtype", [(1, "float32"), (8, "float16")])
def test_the_run_ends_and_saves_nothing_bad(what, at, dtype, flags, tmp_path, run_spoiled):
    """It names the step. In float16 the scaler first reduces the loss scale until it is 1."""
    if what == "running statistic":
        flags = [*flags, "--norm", "batchnorm"]  # its output in training does not depend on them
    steps = "60" if (what, dtype) == ("gradient", "float16") else "20"
    error = run_spoiled([*flags, *EVERY.split(), "--steps", steps, "--dtype", dtype], what, at)
    if (what, dtype) == ("gradient", "float16"):
        at += 16  # the scale starts at 2**16
    due = at if what != "running statistic" else -(-at // 4) * 4  # noticed when the weights are checked
    assert f"not finite at step {due}" in error
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1] == {"step": due, "not_finite": True}
    saved = list_checkpoints(tmp_path / "run")
    assert [path.name for path in saved] == [f"step-{step:06d}" for step in range(4, at, 4)]
    for path in saved:
        assert all(tensor.isfinite().all() for tensor in load_file(path / "model.safetensors").values())


def test_a_validation_loss_that_is_not_finite_names_the_step(flags, tmp_path, run_spoiled):
    """A running statistic is checked only when a checkpoint is saved, which is later."""
    more = ["--norm", "batchnorm", "--steps", "20", "--eval-every", "4", "--save-every", "20"]
    error = run_spoiled([*flags, *more], "running statistic", 4)
    assert "validation loss is not finite at step 4" in error
    assert not list_checkpoints(tmp_path / "run")


SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_token_is_drawn_from_logits_that_are_not_finite(sampling, value, monkeypatch):
    """-inf is a token of probability 0."""
    model, calls = Llama(dim=16, layers=1, heads=1, context=16, vocab_size=11), itertools.count()

    def next_logits(model: Llama, *args: Any) -> Tensor:
        logits = model.logits(model.hidden(*args)[:, -1]).clone()
        if next(calls) == 2:
            logits[1, 4] = value
        return logits

    monkeypatch.setattr(Llama, "next_logits", next_logits)
    prompts = torch.tensor([[1, 2], [3, 4], [5, 6]])
    if value == -math.inf:
        ids = generate.generate(model, prompts, tokens=8, **sampling)
        assert ids.shape == (3, 10) and int(ids[1, 4]) != 4
        return
    with pytest.raises(NotFinite, match="logit of the model is not finite"):
        generate.generate(model, prompts, tokens=8, **sampling)
