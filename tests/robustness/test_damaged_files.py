"""Damaged files of a run: each flipped bit and each truncation is refused in one line with the file's name, repaired,
or harmless. What is harmless: samples.txt is only looked at; a digit of metrics.jsonl that became another digit, or a
last row that is gone, changes what is reported and not what is trained; loss.png and report.html are never read.
"""

import dataclasses
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import generate
import train
from runtime import checkpoint as checkpoints
from runtime.checkpoint import find_checkpoint, intact_checkpoint, list_checkpoints
from runtime.report import write_report
from runtime.run import resolve_run
from runtime.run_dir import Log, read_rows

# A model so small that headers and names are hit as often as numbers.
SMALL = "--dim 4 --hidden-dim 4 --layers 1 --heads 1 --context 16 --batch-size 4 --tokenizer sentencepiece"
COMMAND = f"{SMALL} --vocab-size 290 --device cpu --dtype float32 --no-fast --steps 20 --eval-every 10 --save-every 10"
TRAINING_STATE = ("optimizer.safetensors", "trainer.json")


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in run/ and its prepared corpus in cache/."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text(text.read_text()[:8000])
    paths = f"--data {folder / 'text.txt'} --cache-dir {folder / 'cache'} --out {folder / 'run'}"
    train.main(f"{COMMAND} {paths}".split())
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return shutil.copytree(folder / "run", tmp_path / "run")


def flip(content: bytes, bit: int) -> bytes:
    return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def damages(content: bytes, draw: random.Random, flips: int, cuts: int) -> Iterator[bytes]:
    """`content` with one bit flipped, `flips` times, and cut off, `cuts` times."""
    yield from (flip(content, draw.randrange(8 * len(content))) for _ in range(flips))
    yield from (content[: draw.randrange(len(content))] for _ in range(cuts))


def resumed(run: Path) -> dict[str, Any]:
    """What `--resume` goes on with: settings, text, weights and optimizer state."""
    flags = train.parse(["--resume", "--out", str(run), "--cache-dir", str(run.parent / "cache")])
    trainer = train.Trainer(resolve_run(flags), resume=True)
    Log(run, trainer.step, lambda row: None)
    config, data = trainer.run.config, trainer.run.data
    state = dict(trainer.model.state_dict())
    for optimizer in trainer.optimizers:
        for index, values in optimizer.state_dict()["state"].items():
            state |= {f"{type(optimizer).__name__} {index} {name}": value for name, value in values.items()}
    return {
        "step": trainer.step,
        "settings": (dataclasses.asdict(trainer.model.config), dataclasses.asdict(config)),
        "text": (data.tokenizer.hash, data.train.tokens.tobytes(), data.val.tokens.tobytes(), data.val_gzip_bpb),
        "state": {name: tensor.numpy().tobytes() for name, tensor in state.items()},
    }


def test_damaged_run_and_corpus(folder, cases, record, capsys):
    """Each file in turn: run.json, metrics.jsonl, samples.txt and the prepared corpus."""
    run, draw = folder / "run", random.Random(0)
    expected = resumed(run)
    files = [run / name for name in ("run.json", "metrics.jsonl", "samples.txt")]
    prepared = [path for path in (folder / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    outcomes = {path.name: dict.fromkeys(("refused", "repaired", "harmless"), 0) for path in (*files, *prepared)}
    kept = {path: path.read_bytes() for path in (*files, *prepared)}
    flips, cuts = cases(4, 5000 // len(kept) + 1), cases(2, 500 // len(kept) + 1)
    for path, content in kept.items():
        for number, damaged in enumerate(damages(content, draw, flips, cuts)):
            path.write_bytes(damaged)
            outcome = "harmless"
            capsys.readouterr()
            try:
                found = resumed(run)
                if path not in prepared and number % 10 == 0 and read_rows(run / "metrics.jsonl"):
                    write_report(run, gzip_bpb=2.0)
            except ValueError as error:
                assert path.name in ("run.json", "metrics.jsonl")
                assert str(path) in str(error) and "\n" not in str(error)
                outcome = "refused"
            else:
                assert found == expected, f"{path.name} {number}"
                if "preparing" in capsys.readouterr().err:
                    outcome = "repaired"
                    assert path.read_bytes() == content
            outcomes[path.name][outcome] += 1
            for each, earlier in kept.items():
                each.write_bytes(earlier)
    assert outcomes["run.json"]["refused"] > outcomes["run.json"]["harmless"]
    assert outcomes["samples.txt"]["refused"] == 0
    for name in ("train.bin", "val.bin", "tokenizer.model"):
        assert outcomes[name] == {"refused": 0, "repaired": flips + cuts, "harmless": 0}
    record(flips=len(kept) * flips, truncations=len(kept) * cuts, outcomes=outcomes)


def test_damaged_checkpoints(run, tmp_path, cases, record, capsys):
    """Each file of the newest checkpoint in turn: the run goes back to the one before, and nothing else reads it."""
    draw = random.Random(1)
    older, newest = list_checkpoints(run)
    (tmp_path / "alone/checkpoints").mkdir(parents=True)
    (tmp_path / "alone/checkpoints" / newest.name).symlink_to(newest)
    files = sorted(newest.iterdir())
    flips, cuts = cases(12, 5000 // len(files) + 1), cases(4, 500 // len(files) + 1)
    for path in files:
        content = path.read_bytes()
        for damaged in damages(content, draw, flips, cuts):
            path.write_bytes(damaged)
            checkpoints._warn.cache_clear()
            capsys.readouterr()
            assert intact_checkpoint(run) == older
            (line,) = capsys.readouterr().err.splitlines()
            assert str(path) in line and line.endswith(f"going back to {older.name}")
            with pytest.raises(ValueError, match=rf"{path.name} .*no other checkpoint of .*alone is intact"):
                intact_checkpoint(tmp_path / "alone")
            if path.name in TRAINING_STATE:
                assert find_checkpoint(newest) == newest  # a model alone does not need it
            else:
                with pytest.raises(ValueError, match=path.name):
                    find_checkpoint(newest)  # never another one than the one that was named
                assert find_checkpoint(run) == older
        path.write_bytes(content)
    assert intact_checkpoint(run) == newest
    record(flips=len(files) * flips, truncations=len(files) * cuts, unnoticed=0, files=[path.name for path in files])


@pytest.mark.parametrize("moment", ["before it is verified", "before it is read"])
def test_a_checkpoint_that_its_run_deletes_is_not_damaged(moment, run, monkeypatch, capsys):
    """Another one is read, without a word."""
    older, newest = list_checkpoints(run)
    verify = checkpoints.verify

    def delete_and_verify(checkpoint: Path, *options: Any, **named: Any) -> None:
        if moment == "before it is verified":
            shutil.rmtree(newest, ignore_errors=True)
        verify(checkpoint, *options, **named)
        shutil.rmtree(newest, ignore_errors=True)

    monkeypatch.setattr(checkpoints, "verify", delete_and_verify)
    assert checkpoints.open_checkpoint(run)[0] == older
    assert capsys.readouterr().err == ""
    (newest.parent / "step-999999").symlink_to("on_a_disk_that_is_not_mounted")
    assert checkpoints.open_checkpoint(run)[0] == older
    assert "step-999999/manifest.json is missing" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is not a directory"):
        checkpoints.open_checkpoint(newest)  # never another one than the one that was named


def command(main: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, list[str]]:
    """Exit code, output and error lines of a command in this process."""
    checkpoints._warn.cache_clear()
    capsys.readouterr()
    code = 0
    try:
        main(arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    output, errors = capsys.readouterr()
    return code, output, errors.splitlines()


def damage(checkpoint: Path) -> Path:
    path = checkpoint / "model.safetensors"
    path.write_bytes(flip(path.read_bytes(), 4000))
    return path


def test_commands_go_back_to_an_intact_checkpoint(folder, run, fingerprint, capsys):
    older, newest = list_checkpoints(run)
    path = damage(newest)
    (newest.parent / f"damaged-{newest.name}").symlink_to(folder)  # which is in the way
    for main, arguments in (
        (train.main, ["--eval-only", "--out", str(run)]),
        (generate.main, ["--checkpoint", str(run), "--tokens", "2", "--no-fast"]),
        (train.main, ["--resume", "--out", str(run)]),
    ):
        code, output, errors = command(main, arguments, capsys)
        assert code == 0 and f"going back to {older.name}" in errors[0] and str(path) in errors[0]
        assert "going back" not in "".join(errors[1:])
        assert older.name in output + "".join(errors)
    assert (newest.parent / f"damaged-{newest.name}").is_dir() and folder.is_dir()
    assert fingerprint(run) == fingerprint(folder / "run")  # the lost steps were trained again
    assert (run / "samples.txt").read_text() == (folder / "run/samples.txt").read_text()


def test_a_run_without_an_intact_checkpoint_is_refused(run, capsys):
    """It does not start again, and a checkpoint that was named is not replaced by another one."""
    older, newest = list_checkpoints(run)
    path = damage(newest)
    code, _, errors = command(generate.main, ["--checkpoint", str(newest)], capsys)
    assert code == 2 and len(errors) == 1 and str(path) in errors[0]
    damage(older)
    metrics = (run / "metrics.jsonl").read_bytes()
    for main, arguments in (
        (train.main, ["--resume", "--out", str(run)]),
        (train.main, ["--eval-only", "--out", str(run)]),
        (generate.main, ["--checkpoint", str(run)]),
    ):
        code, _, errors = command(main, arguments, capsys)
        assert code == 2 and len(errors) == 1
        assert str(path) in errors[0] and "no other checkpoint" in errors[0]
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_a_model_alone_needs_no_training_state(run):
    """As when it was deleted to save space."""
    newest = list_checkpoints(run)[-1]
    for name in TRAINING_STATE:
        (newest / name).unlink()
    assert find_checkpoint(run) == checkpoints.open_checkpoint(newest)[0] == newest


def test_a_log_that_is_cut_off_is_said(run, capsys):
    """The steps that it lacks were trained, so the run goes on; half a character in the samples does not matter."""
    (run / "metrics.jsonl").write_text("")
    (run / "samples.txt").write_bytes(b"----- step 0 -----\n\xc3")
    code, output, _ = command(train.main, ["--resume", "--out", str(run), "--steps", "10"], capsys)
    assert code == 0 and "already finished" in output
    code, _, errors = command(train.main, ["--resume", "--out", str(run), "--steps", "22"], capsys)
    assert code == 0
    assert f"warning: {run / 'metrics.jsonl'} is cut off: steps 1 to 20 are not in it" in errors
    assert "----- step 0 -----\n\N{REPLACEMENT CHARACTER}" in (run / "report.html").read_text("utf-8")


def test_an_edited_run_is_resumed_once_its_checksum_is_removed(run, capsys):
    path = run / "run.json"
    edited = path.read_text().replace('"eval_every": 10', '"eval_every": 5')
    path.write_text(edited)
    code, _, errors = command(train.main, ["--resume", "--out", str(run)], capsys)
    assert code == 2 and errors == [
        f"error: {path} is damaged: its sha256 differs; remove that line if you have edited the file"
    ]
    lines = edited.splitlines()
    path.write_text("\n".join([*lines[:-3], lines[-3].rstrip(","), "}"]))
    assert command(train.main, ["--resume", "--out", str(run)], capsys)[0] == 0


def test_an_intact_checkpoint_is_not_deleted_before_a_damaged_one(flags, tmp_path):
    checkpoints, steps = tmp_path / "run/checkpoints", ["--save-every", "3", "--keep", "2", "--steps"]
    train.main([*flags, *steps, "9"])
    (checkpoints / "step-000009/model.safetensors").write_bytes(b"")
    train.main([*flags, "--resume", "--save-every", "10", "--steps", "10"])
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["damaged-step-000009", "step-000006", "step-000010"]


def test_a_run_that_was_killed_at_its_first_save_begins_again(flags, tmp_path, fingerprint):
    """The row of that step is logged before the checkpoint is written, so there is a row and no checkpoint."""
    run = tmp_path / "run"
    train.main([*flags, "--save-every", "3", "--steps", "3"])
    expected = fingerprint(run)
    shutil.rmtree(run / "checkpoints/step-000003")
    train.main([*flags, "--resume"])
    assert fingerprint(run) == expected


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(flags, tmp_path, capsys):
    """Its log would be lost. They may be on a disk that is not mounted."""
    train.main([*flags, "--save-every", "3", "--steps", "6"])
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    rows = (run / "metrics.jsonl").read_text()
    (run / "checkpoints").rename(elsewhere)
    for link in (False, True):
        if link:
            (run / "checkpoints").symlink_to(tmp_path / "not mounted")
        with pytest.raises(SystemExit) as stopped:
            train.main([*flags, "--resume", "--steps", "9"])
        assert stopped.value.code == 2 and "holds no checkpoint, but the log reaches step 6" in capsys.readouterr().err
        assert (run / "metrics.jsonl").read_text() == rows
