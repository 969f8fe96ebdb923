"""Damaged checkpoints: the one before is used and a line says so, or one line refuses. Never a silent restart."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import generate
import train
from runtime import checkpoint as checkpoints
from runtime.checkpoint import find_checkpoint, list_checkpoints

COMMAND = (
    "--dim 4 --hidden-dim 4 --layers 1 --heads 1 --context 16 --batch-size 4 --tokenizer bytes --device cpu "
    "--dtype float32 --steps 20 --eval-every 10 --save-every 10"
)
Ends = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in run/ and its prepared corpus in cache/."""
    folder = tmp_path_factory.mktemp("finished")
    train.main(f"{COMMAND} --data {text} --cache-dir {folder / 'cache'} --out {folder / 'run'}".split())
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    checkpoints._warn.cache_clear()
    return shutil.copytree(folder / "run", tmp_path / "run")


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


def test_commands_go_back_to_an_intact_checkpoint(folder, run, fingerprint, ends: Ends):
    newest = list_checkpoints(run)[-1]
    path = damage(newest)
    for main, arguments in commands(run):
        checkpoints._warn.cache_clear()
        code, errors = ends(main, arguments)
        assert code == 0 and errors.count("going back to step-000010") == 1 and str(path) in errors
    assert (newest.parent / f"damaged-{newest.name}").is_dir()
    assert fingerprint(run) == fingerprint(folder / "run")  # the lost steps were trained again
    assert (run / "samples.txt").read_text() == (folder / "run/samples.txt").read_text()


def test_a_run_without_an_intact_checkpoint_is_refused(run, ends: Ends):
    """It does not start again, and a checkpoint that was named is not replaced by another one."""
    older, newest = list_checkpoints(run)
    path = damage(newest)
    code, errors = ends(generate.main, ["--checkpoint", str(newest)])
    assert code == 2 and errors.count("\n") == 1 and str(path) in errors
    damage(older)
    metrics = (run / "metrics.jsonl").read_bytes()
    for main, arguments in commands(run):
        code, errors = ends(main, arguments)
        assert code == 2 and errors.count("\n") == 1 and str(path) in errors and "no other checkpoint" in errors
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_a_model_alone_needs_no_training_state(run):
    """As when it was deleted to save space."""
    newest = list_checkpoints(run)[-1]
    for name in checkpoints.TRAINING_STATE:
        (newest / name).unlink()
    assert find_checkpoint(run) == checkpoints.open_checkpoint(newest)[0] == newest


def test_a_run_that_was_killed_at_its_first_save_begins_again(flags, tmp_path, fingerprint):
    """The row of that step is logged before the checkpoint is written, so there is a row and no checkpoint."""
    run = tmp_path / "run"
    train.main([*flags, "--save-every", "3", "--steps", "3"])
    expected = fingerprint(run)
    shutil.rmtree(run / "checkpoints/step-000003")
    train.main([*flags, "--resume"])
    assert fingerprint(run) == expected


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(run, ends: Ends):
    """Its log would be lost. They may be on a disk that is not mounted."""
    rows = (run / "metrics.jsonl").read_text()
    shutil.rmtree(run / "checkpoints")
    code, errors = ends(train.main, ["--resume", "--out", str(run), "--steps", "30"])
    assert code == 2 and "holds no checkpoint, but the log reaches step 20" in errors
    assert (run / "metrics.jsonl").read_text() == rows


def test_a_training_state_that_does_not_match_is_refused(run, ends: Ends):
    """Its manifest fits, so only its content can give it away."""
    older, newest = list_checkpoints(run)
    shutil.rmtree(older)
    for content in ("[]", '{"step": "x"}', '{"step": 20, "seconds": null}'):
        (newest / "trainer.json").write_text(content)
        files = [path for path in newest.iterdir() if path.name != "manifest.json"]
        hashes = {path.name: checkpoints.sha256(path) for path in sorted(files)}
        manifest = hashes | {"manifest.json": checkpoints._hash_of(hashes)}
        (newest / "manifest.json").write_text(json.dumps(manifest))
        code, errors = ends(train.main, ["--resume", "--out", str(run), "--steps", "30"])
        assert code == 2 and "trainer.json" in errors.splitlines()[-1], errors


def test_the_folder_of_checkpoints_may_be_a_link_to_another_disk(run, ends: Ends, tmp_path):
    shutil.move(run / "checkpoints", tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    assert ends(train.main, ["--resume", "--out", str(run), "--steps", "21"])[0] == 0
    assert (tmp_path / "disk/step-000021").is_dir()
