"""Damaged checkpoints: the one before is used and a line says so, or one line refuses. Never a silent restart."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import files
import generate
import train
from runtime.checkpoint import list_checkpoints


@pytest.fixture
def run(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, whose checkpoints are on another disk."""
    run = shutil.copytree(undisturbed, tmp_path / "run")
    shutil.move(run / "checkpoints", tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    return run


def damage(checkpoint: Path) -> Path:
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    return path


def commands(run: Path) -> list[tuple[Any, list[str]]]:
    return [
        (train.main, ["--eval-only", "--out", str(run)]),
        (generate.main, ["--checkpoint", str(run), "--tokens", "2"]),
        (train.main, ["--resume", "--out", str(run)]),
    ]


def test_commands_go_back_to_an_intact_checkpoint(undisturbed, run, same, ends):
    path = damage(list_checkpoints(run)[-1])
    for main, arguments in commands(run):
        files.warned.clear()  # as in a new process
        code, errors = ends(main, arguments)
        assert code == 0 and errors.count("going back to step-000006") == 1 and str(path) in errors
    assert same(run, undisturbed)  # the lost steps were trained again, and their checkpoint replaced
    assert "going back" not in ends(*commands(run)[0])[1]


def test_a_run_without_an_intact_checkpoint_is_refused(run, refused):
    """It does not start again, and a checkpoint that was named is not replaced by another one."""
    older, newest = list_checkpoints(run)
    path = damage(newest)
    assert str(path) in refused(generate.main, ["--checkpoint", str(newest)])
    damage(older)
    metrics = (run / "metrics.jsonl").read_bytes()
    for main, arguments in commands(run):
        errors = refused(main, arguments)
        assert str(path) in errors and "no other checkpoint" in errors
    (run / "checkpoints").unlink()  # the disk is not mounted
    errors = refused(train.main, ["--resume", "--out", str(run), "--steps", "30"])
    assert "holds no checkpoint; restore it, or delete metrics.jsonl" in errors
    assert (run / "metrics.jsonl").read_bytes() == metrics
