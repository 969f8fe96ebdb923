"""The same bits every time on one machine, and a warning where a resumed run cannot have them."""

import json
import random
from typing import Any

import pytest
import torch

import train
from runtime.run_dir import changed_machine

pytestmark = pytest.mark.usefixtures("undrawn")

ARMS = (
    "--dtype float32",
    "--dtype bfloat16 --no-fast --norm layernorm --optimizer adamw",
    "--dtype float16 --norm batchnorm --placement post",
    "--placement ngpt --micro-batch-size 2",
    "--norm powernorm --recompute",
    "--norm dyt --scaled-embedding --kv-heads 1",
    "--placement siamese --qk-norm full",
)


def test_three_runs_have_the_same_bits(full, cases, record, flags, tmp_path, start, fingerprint, logged):
    """Weights, optimizer state, log and sample; in full, one of them in a process of its own."""
    arms = random.Random(0).sample(ARMS, cases(1, len(ARMS)))
    for number, arm in enumerate(arms):
        runs = [tmp_path / f"{number}-{name}" for name in "abc"]
        options = f"{arm} --steps {cases(5, 40)} --dropout 0.1 --eval-tokens 500 --out".split()
        for run in runs:
            if full and run == runs[0]:
                own = start("train.py", *flags, *options, run)
                _, error = own.communicate(timeout=300)
                assert own.returncode == 0, error
            else:
                train.main([*flags, *options, str(run)])
        for run in runs[1:]:
            assert fingerprint(run) == fingerprint(runs[0]), arm
            assert logged(run) == logged(runs[0])
            assert (run / "samples.txt").read_text() == (runs[0] / "samples.txt").read_text()
    record(arms=len(arms), runs_each=3, equal_bit_for_bit=len(arms))


CHANGES: dict[str, Any] = {
    "device": lambda run: run | {"device": "another"},
    "torch": lambda run: run | {"versions": run["versions"] | {"torch": "2.0.0"}},
    "instruction_set": lambda run: run | {"instruction_set": "NEON"},
    "nothing": lambda run: run,
    "an older run.json": lambda run: {name: run[name] for name in run.keys() - {"instruction_set"}},
}


def test_a_resume_elsewhere_is_warned_about(flags, tmp_path, capsys):
    """In one line, which names what has changed. The threads are part of the device."""
    run_file = tmp_path / "run/run.json"
    train.main([*flags, "--steps", "1"])
    run = json.loads(run_file.read_text())
    for name, change in CHANGES.items():
        warned = changed_machine(change(run), run)
        assert [line.split()[0] for line in warned] == [name] * (name not in ("nothing", "an older run.json"))
    capsys.readouterr()
    train.main([*flags, "--resume", "--steps", "2"])
    assert "same bits" not in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        threads = torch.get_num_threads()
        patch.setattr(torch, "get_num_threads", lambda: threads + 1)
        train.main([*flags, "--resume", "--steps", "3"])
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "same bits" in line]
    assert f"{threads} threads" in warning and f"{threads + 1} threads" in warning
