"""The figures that train.py reports, by hand: a step takes 2 seconds, an evaluation 50, and a checkpoint 7."""

import io
import os
import shutil
import signal
from typing import Any

import pytest

import train
from runtime.progress import tqdm
from runtime.run_dir import read_rows

RUN = "--dim 32 --layers 2 --heads 4 --context 32 --batch-size 8 --micro-batch-size 4 --tokenizer bytes --device cpu "
RUN += "--dtype float32 --steps 13 --eval-every 10 --save-every 10"
TOKENS = 8 * 32  # per step


def test_seconds_and_tokens_of_a_run_that_is_resumed(tmp_path, text, monkeypatch, capsys):
    clock = [1000.0]  # seconds, which only what takes time advances

    def taking(seconds: float, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def slow(*args: Any) -> Any:
            clock[0] += seconds
            return function(*args)

        monkeypatch.setattr(owner, name, slow)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    taking(2, train, "accumulate_gradients")
    taking(50, train, "evaluate")
    taking(7, train.checkpoints, "save_checkpoint")
    shown = []
    monkeypatch.setattr(tqdm, "set_postfix_str", lambda bar, figures, **options: shown.append(figures))
    monkeypatch.setattr("runtime.progress.peak_memory", lambda device: 2.54e9)
    out, speed = tmp_path / "run", TOKENS / 2.0
    flags = [*RUN.split(), "--data", str(text), "--cache-dir", str(tmp_path / "cache"), "--out", str(out)]

    def figures() -> list[tuple]:
        rows = [row for row in read_rows(out / "metrics.jsonl") if "train_loss" in row]
        return [(row["tokens"], row["seconds"], row["tokens_per_second"]) for row in rows]

    train.main(flags)
    # The last three steps come after an evaluation and a checkpoint, whose time is not theirs.
    assert figures() == [(10 * TOKENS, 20.0, speed), (13 * TOKENS, 20 + 57 + 6, speed)]
    assert shown[-1].endswith(f", tokens/s {speed:,.0f}")
    printed = capsys.readouterr().out
    assert "done in 140 s, peak memory 2.5 GB" in printed  # 13 steps, 2 evaluations, 2 checkpoints
    # Without a progress bar, a line at most every 30 seconds: not after the 20 of step 10.
    assert printed.count(", tokens/s") == 1 and f"step 13: {shown[-1]}\n" in printed

    shutil.rmtree(out / "checkpoints" / "step-000013")
    clock[0] += 10_000  # while nothing runs
    train_step = train.Trainer.train_step

    def step_and_stop(trainer: train.Trainer) -> None:
        train_step(trainer)
        if trainer.step + 1 == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(train.Trainer, "train_step", step_and_stop)
        train.main([*flags, "--resume"])
    train.main([*flags, "--resume"])
    # Saved after 20 s, before the evaluation. The speed is that of the one step after the signal.
    assert figures()[-1] == (13 * TOKENS, 20 + 6, speed)
    assert "done in 83 s" in capsys.readouterr().out

    monkeypatch.setattr("sys.stderr", terminal := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    train.main(["--resume", "--steps", "15", "--out", str(out)])
    printed = capsys.readouterr().out
    bar = terminal.getvalue()
    assert "13/15" in bar and "15/15" in bar and "step 15: val_loss" in printed and ", tokens/s" not in printed
