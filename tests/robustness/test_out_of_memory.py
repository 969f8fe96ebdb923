"""Memory that runs out: exit code 3, what to change, nothing damaged."""

import torch

import generate
import train
from runtime.checkpoint import list_checkpoints, verify


def allocate_too_much() -> None:
    torch.empty(1 << 60)


def test_a_training_step_without_memory(flags, ends, tmp_path, monkeypatch):
    """The checkpoint before it is intact."""
    train_step = train.Trainer.train_step

    def step_or_fail(trainer: train.Trainer) -> None:
        if trainer.step == 4:
            allocate_too_much()
        train_step(trainer)

    monkeypatch.setattr(train.Trainer, "train_step", step_or_fail)
    code, error = ends(train.main, [*flags, "--steps=6", "--save-every=3"])
    assert code == 3 and error.splitlines()[-1].startswith("error: out of memory; try a smaller --micro-batch-size")
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000003"]
    verify(tmp_path / "run/checkpoints/step-000003")


def test_generating_without_memory(undisturbed, ends, monkeypatch):
    monkeypatch.setattr(generate, "stream_text", lambda *args: allocate_too_much())
    code, error = ends(generate.main, ["--device", "cpu", "--checkpoint", str(undisturbed)])
    assert code == 3 and error.splitlines()[-1] == "error: out of memory; try a smaller --samples or --tokens"
