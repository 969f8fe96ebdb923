"""Damaged checkpoints: the one before is used and a line says so, or one line refuses. Never a silent restart."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import files
import generate
import train
from files import sha256
from runtime.checkpoint import list_checkpoints
from runtime.run_dir import read_run_file, write_run_file


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


def test_a_checkpoint_of_another_run_or_step_is_refused(undisturbed, run, same, refused):
    """Those of 5a132b0 do not say whose they are, and continue."""
    resume, described = ["--resume", "--out", str(run)], read_run_file(run / "run.json")
    older, newest = list_checkpoints(run)
    renamed = newest.rename(newest.with_name("step-999999"))
    assert f"{renamed} holds another step, or is of another run; move it away" in refused(train.main, resume)
    shutil.rmtree(renamed)
    write_run_file(run / "run.json", described | {"id": "other"})
    assert str(older) in refused(train.main, resume)
    trainer, manifest = older / "trainer.json", older / "manifest.json"
    before = sha256(trainer)
    trainer.write_text(trainer.read_text().replace(f'"run": "{described["id"]}",', ""))
    manifest.write_text(manifest.read_text().replace(before, sha256(trainer)))
    train.main(resume)
    assert same(run, undisturbed)


def test_a_log_that_ends_before_its_checkpoint_is_named(run, ends):
    log, resume = run / "metrics.jsonl", ["--resume", "--out", str(run)]
    lines = log.read_bytes().splitlines(keepends=True)
    for kept, ending in ((4, None), (3, None), (2, 6), (0, 0), ("missing", 0)):  # the last row is an evaluation's
        files.warned.clear()
        log.unlink()
        if kept != "missing":
            log.write_bytes(b"".join(lines[:kept]))
        said = [line for line in ends(train.main, resume)[1].splitlines() if "warning" in line]
        assert said == [f"warning: {log} ends at step {ending}, before step-000009"] * (ending is not None)
