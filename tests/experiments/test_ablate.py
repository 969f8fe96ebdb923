"""The command `ablate.py`. Its cells are real runs of train.py, in processes of their own."""

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import ablate
from files import lock_file
from runtime.run_dir import LOCK
from tests.robustness import conftest

FLAGS = "--dim 16 --layers 2 --heads 2 --context 16 --batch-size 4 --tokenizer bytes --device cpu --dtype float32 "
FLAGS += "--lr 0.01 --steps 12 --watch 12 --norms rmsnorm layernorm:bias=false --placements pre --factor clip=0"
fork, until = conftest.fork, conftest.until


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, text) -> list[str]:
    """Of a comparison of two runs."""
    folder = tmp_path_factory.mktemp("ablation")
    flags = f"{FLAGS} --seeds 1 --jobs 2 --data {text} --cache-dir {folder / 'cache'} --out"
    return [*flags.split(), str(folder / "the out")]


@pytest.fixture(scope="module")
def folder(arguments) -> Path:
    """The folder of the finished ablation."""
    ablate.main(arguments)
    return Path(arguments[-1])


def test_the_table_follows_from_runs_csv_which_follows_from_the_logs(folder, arguments):
    with open(folder / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["norm"], row["seed"]) for row in rows] == [("rmsnorm", "0"), ("layernorm:bias=false", "0")]
    for row in rows:
        cell = folder / "cells" / f"{row['norm'].replace(':', '-')}-pre-clip=0-lr0.01-seed{row['seed']}"
        last = json.loads((cell / "metrics.jsonl").read_text().splitlines()[-1])
        assert (float(row["val_loss"]), float(row["val_bpb"])) == (last["val_loss"], last["val_bpb"])
        run = json.loads((cell / "run.json").read_text())
        assert run["resolved"]["norm_args"] == ({} if row["norm"] == "rmsnorm" else {"bias": False})
        assert (int(row["parameters"]), row["steps"], row["commit"]) == (run["parameters"], "12", str(run["commit"]))
        assert row["data"] == f"text@{run['corpus']['hash'][:12]}"
    base, arm = (float(row["val_bpb"]) for row in rows)
    table = (folder / "table.md").read_text()
    assert f"| rmsnorm | – | – | – | – | {base:.4f} (1) | 0.01 | 0 of 1 | 1.00 | – |" in table
    assert f"| layernorm:bias=false | {arm - base:+.4f} (1) | no verdict | – | – | {arm:.4f} (1) | 0.01 |" in table
    report = json.loads((folder / "report.json").read_text())
    assert report["arms"][0]["val_bpb"] == base and report["comparisons"][0]["difference"] == arm - base
    command = "python ablate.py " + " ".join(arguments[:-1]) + f" '{folder}'"
    assert (folder / "command.txt").read_text() == command + "\n" and command in table and ", torch " in table
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        assert all((folder / f"{name}.{kind}").read_bytes().startswith(start) for name in ("curves", "watch"))


def test_compare_makes_the_same_files_of_the_folder_and_of_its_runs_csv_alone(folder, tmp_path, capsys):
    (tmp_path / "published").mkdir()
    shutil.copy(folder / "runs.csv", tmp_path / "published")
    for source in (folder, tmp_path / "published"):
        ablate.main(["compare", str(source), "--out", str(tmp_path / "again")])
        assert f"see {tmp_path / 'again'}/report.html" in capsys.readouterr().out
        for name in ("runs.csv", "arms.csv", "report.json"):
            assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


def test_commands_of_runs_for_other_machines(arguments, folder, capsys, monkeypatch, tmp_path):
    """A line of shell a run that has not ended, which starts it or, repeated, resumes it. Nothing is run here."""
    monkeypatch.setattr(sys, "executable", "printenv OMP_NUM_THREADS; echo")
    for rates, number in (("", 2), ("--lrs 0.02 0.03", 6)):  # the first seed has been run, and another selects rates
        with pytest.raises(SystemExit) as ended:
            ablate.main([*arguments, "--seeds", "2", "--print-commands", *rates.split()])
        lines = capsys.readouterr().out.splitlines()
        assert not ended.value.code and len(lines) == number
    line = lines[0].replace("'printenv OMP_NUM_THREADS; echo'", "printenv OMP_NUM_THREADS; echo")
    run = Path(re.findall(r"-e '(.+)/run.json'", line)[0])
    assert not run.exists()
    for flag in ("--seed=1000 ", "--resume "):
        threads, command = subprocess.run(["sh", "-c", line], capture_output=True, text=True).stdout.splitlines()
        assert threads == "1" and flag in command and "--device=cpu" in command and command.endswith(f"--out={run}")
        run.mkdir(exist_ok=True)
        (run / "run.json").touch()
    shutil.rmtree(run)


def test_an_ablation_whose_folder_is_in_use_ends_with_4_in_one_line(folder, arguments, ends):
    with lock_file(folder / LOCK):
        code, error = ends(ablate.main, [*arguments, "--seeds", "9"])
    assert code == 4 and "in use" in error and error.count("\n") == 1
    assert "--seeds 9" not in (folder / "command.txt").read_text()


def processes_with(text: str) -> list[Path]:
    """The processes that have `text` in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            found += [path] if text.encode() in path.read_bytes() else []
    return found


@pytest.mark.parametrize("number, code, runs", [(signal.SIGTERM, 143, 2), (signal.SIGKILL, -9, 1)])
def test_an_ablation_that_ends_leaves_no_process(number, code, runs, text, fork, until, tmp_path):
    """After a signal, its runs save and end before it does."""
    cells = f"{tmp_path}/run/cells/"
    flags = [*conftest.flags_in(tmp_path, text), "--steps=100000", "--eval-tokens=64", f"--seeds={runs}", "--jobs=2"]
    child = fork(ablate.main, flags)
    until(lambda: len([*tmp_path.glob("run/cells/*/run.json")]) == runs)  # setpriv has done its work
    child.send(number)
    assert child.wait() == code, child.text
    if number == signal.SIGTERM:
        assert re.findall("^error.*|Traceback", child.text, re.M) == [child.text.splitlines()[-1]]
        assert child.text.splitlines()[-1].startswith("error: stopped by SIGTERM") and not processes_with(cells)
    until(lambda: not processes_with(cells))
