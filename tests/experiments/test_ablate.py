"""The command `ablate.py`. Its cells are real runs of train.py, in processes of their own."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from experiments.ablation.run import AblationConfig

import ablate
from files import lock_file
from runtime.run_dir import LOCK

FLAGS = (
    "--dim 16 --layers 2 --heads 2 --context 16 --batch-size 4 --tokenizer bytes --device cpu --dtype float32 "
    "--lr 0.01 --steps 12 --norms rmsnorm layernorm:bias=false --placements pre --seeds 1 --jobs 2"
)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, text) -> list[str]:
    """Of a comparison of two runs."""
    folder = tmp_path_factory.mktemp("ablation")
    return f"{FLAGS} --data {text} --cache-dir {folder / 'cache'} --out {folder / 'out'}".split()


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
        cell = folder / "cells" / f"{row['norm'].replace(':', '-')}-pre-lr0.01-seed{row['seed']}"
        last = json.loads((cell / "metrics.jsonl").read_text().splitlines()[-1])
        assert (float(row["val_loss"]), float(row["val_bpb"])) == (last["val_loss"], last["val_bpb"])
        run = json.loads((cell / "run.json").read_text())
        assert run["resolved"]["norm_args"] == ({} if row["norm"] == "rmsnorm" else {"bias": False})
    base, arm = (float(row["val_bpb"]) for row in rows)
    table = (folder / "table.md").read_text()
    assert f"| rmsnorm | pre | 0.01 | {base:.4f} (1) | – | – | – | 0 of 1 | – |" in table and "Partial" not in table
    assert (
        f"| layernorm:bias=false | pre | 0.01 | {arm:.4f} (1) | {arm - base:+.4f} (1) | – | – | 0 of 1 | undecided |"
        in table
    )
    report = json.loads((folder / "report.json").read_text())
    assert report["summary"] == table.splitlines()[0] and report["arms"][0]["val_bpb"] == base
    (found,) = report["comparisons"]
    assert (found["difference"], found["verdict"], found["baseline"]) == (arm - base, "undecided", "rmsnorm pre")
    with open(folder / "arms.csv", newline="") as file:
        sizes = [int(row["parameters"]) for row in csv.DictReader(file)]
    assert sizes == [run["parameters"]] * 2
    command = "python ablate.py " + " ".join(arguments)
    assert (folder / "command.txt").read_text() == command + "\n" and command in table and ", torch " in table


def test_the_page_has_conclusion_plots_table_and_folded_the_rest(folder):
    html = (folder / "report.html").read_text("utf-8")
    assert "<td>layernorm:bias=false</td>" in html
    order = "a single seed.*<img.*<h2>Comparison.*<details><summary>How to.*python ablate.py --dim 16"
    assert re.search(f"Compared with rmsnorm pre: .*{order}.*<details><summary>Settings", html, re.DOTALL)
    assert "<h1>norm: rmsnorm, layernorm:bias=false; placement: pre</h1>" in html and html.count('src="data:') == 2
    for plot in ("curves", "differences"):
        for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
            assert (folder / f"{plot}.{kind}").read_bytes().startswith(start)


def test_commands_of_runs_for_other_machines(arguments, folder, capsys, monkeypatch, tmp_path):
    """A line of shell a run that has not ended, which starts it or, repeated, resumes it. Nothing is run here."""
    table: list[str] = []
    monkeypatch.setattr(sys, "executable", "printenv OMP_NUM_THREADS; echo")
    for rates, number in (("", 2), ("--lrs 0.02 0.03", 6)):  # the first seed has been run, and another selects rates
        with pytest.raises(SystemExit) as ended:
            ablate.main([*arguments, "--seeds", "2", "--print-commands", *rates.split()])
        lines = capsys.readouterr().out.splitlines()
        assert not ended.value.code and len(lines) == number
        table = [(folder / "table.md").read_text(), *table]
    assert table[0] == table[1], "nothing is reported at a rate before all are selected"
    line = lines[0].replace("'printenv OMP_NUM_THREADS; echo'", "printenv OMP_NUM_THREADS; echo")
    run = Path(re.findall(r"-e (\S+)/run.json", line)[0])
    assert not run.exists()
    for flag in ("--seed=1000 ", "--resume "):
        threads, command = subprocess.run(["sh", "-c", line], capture_output=True, text=True).stdout.splitlines()
        assert threads == "1" and flag in command and "--device=cpu" in command and command.endswith(f"--out={run}")
        run.mkdir(exist_ok=True)
        (run / "run.json").touch()
    shutil.rmtree(run)


def test_an_ablation_whose_folder_is_in_use_ends_with_4_in_one_line(folder, arguments, ends):
    before = (folder / "command.txt").read_text()
    with lock_file(folder / LOCK):
        code, error = ends(ablate.main, [*arguments, "--steps", "13"])
    assert code == 4 and "in use" in error and error.count("\n") == 1
    assert (folder / "command.txt").read_text() == before


def test_flags_of_the_comparison_and_of_train_py_are_told_apart_in_any_order():
    mine = "--norms rmsnorm dyt --seeds 2 --jobs 1 --print-commands --lrs 0.1 1e-3 --out x --placements pre post"
    theirs = "--data a b c --no-compile --lr 0.5 --preset small --watch 3"
    options = AblationConfig(["rmsnorm", "dyt"], ["pre", "post"], [], 2, [0.1, 1e-3], 1, 1, True)
    asked = {"data": ["a", "b", "c"], "compile": False, "lr": 0.5, "preset": "small", "watch": 3, "out": "x"}
    for line in (f"{mine} {theirs}", f"{theirs} {mine}", f"--data a b c {mine} {theirs.removeprefix('--data a b c ')}"):
        assert ablate.parse(line.split()) == (options, asked)
