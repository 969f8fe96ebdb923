"""ablate.py: what it trains, what it does not train twice, what it reports. Its cells are real runs of train.py."""

import csv
import json
import math
import random
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import scipy.stats
import torch

import ablate
from config import ModelConfig
from data.batches import evaluation_batches
from data.prepare import prepare
from experiments.ablation.grid import resolve_arms
from experiments.ablation.outcome import Arm
from experiments.ablation.run import resolve_ablation, run_ablation
from experiments.probe import probe
from model import Llama
from runtime.process import exit_codes
from runtime.run_dir import locked

ROOT = Path(__file__).parents[2]
SIZES = (
    "--dim 16 --layers 2 --heads 2 --context 16 --batch-size 4 --tokenizer bytes --device cpu --dtype float32 "
    "--no-fast --lr 0.01 --steps 12 --eval-every 12"
)
GRID = "--norms rmsnorm layernorm:bias=false --seeds 2 --jobs 2 --equivalence 0.5"  # four cells


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    draw = random.Random(0)
    words = ["the", "cat", "dog", "sees", "hears", "a", "bird", "and", "sings", "sleeps"]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(" ".join(draw.choices(words, k=6)) + ".\n" for _ in range(300)))
    return path


def arguments(text: Path, out: Path, flags: str) -> list[str]:
    return f"{SIZES} --data {text} --cache-dir {text.parent / 'cache'} --out {out} {flags}".split()


@pytest.fixture
def command(text, tmp_path):
    """Run `ablate.py` in this process on that text, with more flags in one string."""

    def run(flags: str, out: str | Path = "out") -> Path:
        ablate.main(arguments(text, tmp_path / out, flags))
        return tmp_path / out

    return run


@pytest.fixture(scope="module")
def grid(text, tmp_path_factory) -> Path:
    """The folder of a finished ablation."""
    folder = tmp_path_factory.mktemp("grid") / "out"
    ablate.main(arguments(text, folder, GRID))
    return folder


def csv_rows(folder: Path, name: str = "runs.csv") -> list[dict[str, str]]:
    with open(folder / name, newline="") as file:
        return list(csv.DictReader(file))


def results(folder: Path) -> list[tuple[str, ...]]:
    """The columns of runs.csv that do not depend on time, to the last bit."""
    names = ("norm", "placement", "lr", "seed", "diverged", "step", "val_loss", "val_bpb")
    return [tuple(row[name] for name in names) for row in csv_rows(folder)]


def write_times(folder: Path) -> dict[Path, int]:
    """When each file of the cells was last written."""
    return {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("*") if path.is_file()}


def error_line(capsys, code: int, run, *flags) -> str:
    """The line with which `run` ends with exit code `code`."""
    with pytest.raises(SystemExit) as exit:
        run(*flags)
    assert exit.value.code == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in last
    return last


# --- the results -----------------------------------------------------------------------------------------------------


def test_runs_csv_matches_the_logs_of_the_cells(grid):
    rows = csv_rows(grid)
    order = [(norm, seed) for seed in "01" for norm in ("rmsnorm", "layernorm:bias=false")]
    assert [(row["norm"], row["seed"]) for row in rows] == order
    for row in rows:
        cell = grid / "cells" / f"{row['norm'].replace(':', '-')}-pre-lr0.01-seed{row['seed']}"
        last = json.loads((cell / "metrics.jsonl").read_text().splitlines()[-1])
        assert (row["placement"], row["lr"], row["diverged"], row["step"]) == ("pre", "0.01", "False", "12")
        assert (float(row["val_loss"]), float(row["val_bpb"])) == (last["val_loss"], last["val_bpb"])
        run = json.loads((cell / "run.json").read_text())
        assert run["model"]["norm_args"] == ({} if row["norm"] == "rmsnorm" else {"bias": False})


def test_the_table_follows_from_runs_csv(grid, text):
    bpb = {(row["norm"], row["seed"]): float(row["val_bpb"]) for row in csv_rows(grid)}
    base, arm = ([bpb[norm, seed] for seed in "01"] for norm in ("rmsnorm", "layernorm:bias=false"))

    def show(values: list[float], sign: str = "") -> str:  # for two values: one degree of freedom
        return f"{statistics.mean(values):{sign}.4f} ± {12.7062 * statistics.stdev(values) / math.sqrt(2):.4f} (2)"

    table = (grid / "table.md").read_text()
    assert f"| rmsnorm | pre | 0.01 | {show(base)} | – | – | – | 0 of 2 |" in table
    differences = [here - there for here, there in zip(arm, base, strict=True)]
    p = scipy.stats.ttest_1samp(differences, 0).pvalue
    one_sided = [
        scipy.stats.ttest_1samp(differences, edge, alternative=side).pvalue
        for edge, side in ((0.5, "less"), (-0.5, "greater"))
    ]
    shown = f"{show(differences, '+')} | {p:.4f} | {max(one_sided):.4f}"
    assert f"| layernorm:bias=false | pre | 0.01 | {show(arm)} | {shown} | 0 of 2 |" in table
    (last,) = (row for row in csv_rows(grid, "table.csv") if row["norm"] != "rmsnorm")
    assert float(last["p"]) == pytest.approx(p) and float(last["difference"]) == statistics.mean(differences)
    assert last["tokens"] == str(12 * 4 * 16) and f"{show(base)[:6]}" in (grid / "table.tex").read_text()
    assert "Partial" not in table and not (grid / "interactions.csv").exists()
    exact = "python ablate.py " + " ".join(arguments(text, grid, GRID))
    assert (grid / "command.txt").read_text() == exact + "\n" and exact in table
    for plot in ("curves.png", "differences.png"):
        assert (grid / plot).read_bytes().startswith(b"\x89PNG")


def test_arms_and_seeds_differ(grid):
    assert len({row["val_bpb"] for row in csv_rows(grid)}) == 4


def test_divergence_is_a_row(command, text, capsys):
    """Of the only arm, so there is nothing to compare it with. The probe has statistics for the start only."""
    folder = command("--seeds 1 --lr 1e4 --probe")
    (row,) = csv_rows(folder)
    assert (row["diverged"], row["val_bpb"]) == ("True", "") and 1 <= int(row["step"]) <= 12
    assert "| rmsnorm | pre | 10000 | – | – | – | 1 of 1 |" in (folder / "table.md").read_text()
    assert f"diverged at step {row['step']}" in capsys.readouterr().out
    with open(folder / "probe.csv", newline="") as file:
        found = [
            {name: row[name] for name in ("seed", "when", "block", "residual_rms")} for row in csv.DictReader(file)
        ]
    data = prepare([str(text)], "bytes", 257, text.parent / "cache", 16)
    sizes = ModelConfig(dim=16, layers=2, heads=2, context=16, vocab_size=257)
    expected = probe(Llama(sizes, 0), *next(evaluation_batches(data.val.tokens, 16, 4)))
    assert found == [
        {"seed": "0", "when": "start", "block": str(block), "residual_rms": str(stats.residual_rms)}
        for block, stats in enumerate(expected)
    ]
    before = write_times(folder)
    command("--seeds 1 --lr 1e4 --probe")
    assert write_times(folder) == before


# --- the same command twice ------------------------------------------------------------------------------------------


def test_finished_cells_are_not_trained_twice(grid, command, tmp_path):
    folder = shutil.copytree(grid, tmp_path / "out")
    before = write_times(folder)
    command(f"{GRID} --save-every 3 --keep 1 --jobs 1")
    assert write_times(folder) == before
    assert results(folder) == results(grid)
    first, again = ((there / "table.md").read_text().splitlines() for there in (grid, folder))
    assert again[3:] == first[3:]  # all but the command and the number of jobs


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--steps 13", "steps 12, not 13"),
        ("--hidden-dim 32", "hidden_dim 64, not 32"),
        ("--eval-every 5", "eval_every 12, not 5"),
        ("--threads 2", "1 threads.* not .*2 threads"),
        ("--no-depth-scaled-init --clip 0", "depth_scaled_init True, not False; clip 1.0, not 0.0"),
    ],
)
def test_a_changed_flag_is_refused(flags, named, grid, command, capsys):
    before = write_times(grid)
    try:
        line = error_line(capsys, 2, command, f"{GRID} {flags}", grid)
    finally:
        torch.set_num_threads(1)
    assert re.search(f"cells/rmsnorm-pre-lr0.01-seed0 .*{named}", line)
    assert write_times(grid) == before


def test_a_changed_text_is_refused(grid, text, command, capsys):
    whole = text.read_text()
    text.write_text(whole + "another line\n")
    try:
        assert "has changed since the run started" in error_line(capsys, 2, command, GRID, grid)
    finally:
        text.write_text(whole)


def test_accelerated_and_plain_runs_are_never_mixed(grid, command, capsys, tmp_path):
    """A cell that was trained with the other setting of --fast is refused and not touched."""
    folder = shutil.copytree(grid, tmp_path / "out")
    run_file = folder / "cells" / "rmsnorm-pre-lr0.01-seed1" / "run.json"
    run = json.loads(run_file.read_text())
    assert run["training"]["fast"] is False
    run["training"]["fast"] = True
    run_file.write_text(json.dumps(run))
    before = write_times(folder)
    line = error_line(capsys, 2, command, GRID)
    assert line == f"error: the run in {run_file.parent} has fast True, not False"
    assert write_times(folder) == before


def test_the_kind_of_card_is_compared_and_its_index_is_not(grid, text, tmp_path):
    folder = shutil.copytree(grid, tmp_path / "out")
    ablation = resolve_ablation(*ablate.parse(arguments(text, folder, GRID)))
    run_file = folder / "cells" / "rmsnorm-pre-lr0.01-seed1" / "run.json"
    run = json.loads(run_file.read_text())
    run["training"]["device"] = "cuda:1"
    del run["sha256"]
    run_file.write_text(json.dumps(run))
    ablation.grid.check(ablation.reported)
    run_file.write_text(json.dumps(run | {"device": "another card"}))
    with pytest.raises(ValueError, match="was trained on another card with torch"):
        ablation.grid.check(ablation.reported)


def test_a_damaged_log_of_a_cell_is_named(grid, command, capsys, tmp_path):
    folder = shutil.copytree(grid, tmp_path / "out")
    with (folder / "cells" / "rmsnorm-pre-lr0.01-seed1" / "metrics.jsonl").open("a") as log:
        log.write("garbage\n")
    assert "metrics.jsonl is damaged" in error_line(capsys, 2, command, GRID, folder)


def test_two_commands_do_not_share_a_folder(grid, command, capsys):
    with locked(grid):
        assert "in use" in error_line(capsys, 4, command, GRID, grid)


def test_without_out_the_folder_follows_from_what_is_compared(text, tmp_path, monkeypatch):
    """The same command continues, also with more seeds or learning rates. Another comparison gets another folder."""
    monkeypatch.chdir(tmp_path)
    common = arguments(text, Path(), "")[:-2]

    def folder(flags: str) -> Path:
        return resolve_ablation(*ablate.parse([*common, *flags.split()])).folder

    first = folder("--norms rmsnorm layernorm --seeds 2")
    same = ["--seeds 3", "--seeds 2 --lrs 0.1 0.2", "--seeds 2 --save-every 7 --keep 1", "--jobs 2 --probe"]
    same += ["--equivalence 0.1", "--lrs 0.1 --widen 2"]
    assert {folder(f"--norms rmsnorm layernorm {flags}") for flags in same} == {first}
    others = ["rmsnorm", "rmsnorm layernorm --steps 13", "rmsnorm layernorm --dim 32", "rmsnorm layernorm --seed 1"]
    others += ["rmsnorm layernorm --factor clip=0,1"]
    assert len({folder(f"--norms {flags}") for flags in others} | {first}) == 6


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--norms rmsnrm", "--norms: unknown kind 'rmsnrm'; choose from batchnorm"),
        ("--norms rmsnorm:epsilon=1", "no argument 'epsilon'; it takes eps"),
        ("--norms rmsnorm:eps", "takes key=value, not 'eps'"),
        ("--norm rmsnorm", "--norm is for a single run; use --norms here and list all of them"),
        ("--placement post", "--placement is for a single run"),
        ("--norms none --placements post sandwich", "choose pre or rezero"),
        ("--factor optimiser=muon,adamw", "'optimiser' is no option of train.py"),
        ("--factor optimizer=muon,adam", "argument --optimizer: invalid choice: 'adam'"),
        ("--seeds 0", "--seeds must be at least 1, not 0"),
        ("--seeds 1001", "--seeds must be at most 1000"),
        ("--jobs 0", "--jobs must be at least 1"),
        ("--threads -1", "--threads must be at least 1"),
        ("--lrs 0.1 nan", "--lrs must be positive numbers"),
        ("--lr 0", "--lr must be a positive number"),
        ("--data nosuch", "nosuch"),
        ("--dim 15", "--dim 15 is not divisible by --heads 2"),
        ("--resume", "unrecognized arguments: --resume"),
    ],
)
def test_bad_input_ends_with_one_line(flags, named, command, capsys, tmp_path):
    assert named in error_line(capsys, 2, command, flags)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_refused(command, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    assert "is not empty" in error_line(capsys, 2, command, GRID)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_unsupported_arms_are_skipped_with_the_reason(capsys):
    wanted = [Arm.of(norm=norm, placement=place) for norm in ("none", "rmsnorm") for place in ("post", "mix")]
    assert list(resolve_arms(wanted, ["--layers", "1", "--device", "cpu"])) == [
        Arm.of(norm="rmsnorm", placement="post")
    ]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("skipped: --") for line in lines)


def test_help_lists_the_flags_of_ablate_and_train(capsys):
    with pytest.raises(SystemExit) as exit:
        ablate.parse(["--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert "--placements" in printed and "--steps" in printed
    assert "--norm {" not in printed and "--placement {" not in printed  # refused


def test_flags_of_train_py_are_passed_on_in_order():
    mine = "--norms rmsnorm dyt --seeds 2 --jobs 1 --probe --lrs 0.1 1e-3 --out x --threads 1 --placements pre post"
    theirs = "--data a b c --norm-arg eps=1e-5 --no-compile --lr 0.5 --preset small"
    for line in (f"{mine} {theirs}", f"{theirs} {mine}", f"--data a b c {mine} {theirs.removeprefix('--data a b c ')}"):
        assert ablate.parse(line.split())[1] == theirs.split()


def test_a_cell_that_could_not_save_has_failed_whatever_it_logged(grid, text, capsys):
    ablation = resolve_ablation(*ablate.parse(arguments(text, grid, GRID)))
    cell = ablation.reported[0]
    assert not ablation.grid.finished_outcome(cell, code=0).diverged
    for code, passed_on in ((1, 1), (3, 3), (-9, 1)):
        with pytest.raises(SystemExit) as exit, exit_codes(""):
            ablation.grid.finished_outcome(cell, code)
        assert exit.value.code == passed_on
    assert capsys.readouterr().err.endswith("seed0.log: killed by SIGKILL\n")


@pytest.mark.slow
def test_a_cell_that_fails_is_named_and_the_others_are_reported(command, capsys, tmp_path):
    cells = tmp_path / "out" / "cells"
    cells.mkdir(parents=True)
    (cells / "rmsnorm-pre-lr0.01-seed1").touch()  # a file where its folder should be
    line = error_line(capsys, 2, command, "--norms rmsnorm dyt --seeds 2 --jobs 1 --lrs 0.02")
    assert line.startswith(f"error: {cells}/rmsnorm-pre-lr0.01-seed1.log: --out") and line.endswith("is a file")
    table = (tmp_path / "out" / "table.md").read_text()
    assert "**Partial: 2 of 4 runs have ended.** Missing: seed 1 of all arms." in table
    assert "**Partial: 0 of 8 runs have ended.**" in table and "**Partial: not started.**" in table
    arms = [row["norm"] for row in csv_rows(tmp_path / "out", "table.csv")]
    assert arms == ["rmsnorm", "dyt"] and len(csv_rows(tmp_path / "out")) == 2
    assert (tmp_path / "out" / "differences.png").exists()


# --- more cells ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parallel_jobs_change_nothing_and_seeds_can_be_added(grid, command):
    alone = command(GRID.replace("--jobs 2", "--jobs 1"))
    assert results(alone) == results(grid)
    before = write_times(alone)
    command("--norms rmsnorm layernorm:bias=false --seeds 3 --jobs 3 --probe")
    assert before.items() <= write_times(alone).items()
    assert results(alone)[:4] == results(grid) and len(results(alone)) == 6
    with open(alone / "probe.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 6 * 2 * 3  # cells, start and end, embedding and two blocks


@pytest.mark.slow
def test_runs_are_spread_over_devices_and_factors_interact(text, tmp_path):
    """Two names of the same device. Each runs two of the cells, if they take about the same time."""
    ablation = resolve_ablation(
        *ablate.parse(arguments(text, tmp_path / "out", "--norms rmsnorm dyt --factor clip=0,1 --seeds 2 --jobs 1"))
    )
    ablation = replace(ablation, grid=replace(ablation.grid, devices=("cpu", "auto")))
    run_ablation(ablation, "command")
    runs = [json.loads(file.read_text()) for file in (tmp_path / "out" / "cells").glob("*/run.json")]
    devices = [run["command"][run["command"].index("--device", 20) + 1] for run in runs]
    assert len(runs) == 8 and set(devices) == {"cpu", "auto"}
    bpb = {(row["norm"], row["clip"], row["seed"]): float(row["val_bpb"]) for row in csv_rows(tmp_path / "out")}
    expected = statistics.mean(
        bpb["dyt", "1", seed] - bpb["rmsnorm", "1", seed] - bpb["dyt", "0", seed] + bpb["rmsnorm", "0", seed]
        for seed in "01"
    )
    (row,) = csv_rows(tmp_path / "out", "interactions.csv")
    assert (row["baseline"], row["change"], row["other_change"]) == ("rmsnorm pre clip=0", "dyt", "clip=1")
    assert float(row["difference_of_differences"]) == pytest.approx(expected)


@pytest.mark.slow
def test_each_arm_gets_the_learning_rate_that_is_best_on_other_seeds(command):
    folder = command("--norms rmsnorm --placements pre post --seeds 2 --seed 3 --lr 0.02 --lrs 1e-5 0.03 1e4 --jobs 2")
    rows = csv_rows(folder)
    selection = [row for row in rows if int(row["seed"]) >= 1000]
    assert [row["seed"] for row in rows[:4]] == ["3", "3", "4", "4"] and {row["lr"] for row in rows[:4]} == {"0.02"}
    assert len(selection) == 2 * 4 * 2 and {row["seed"] for row in selection} == {"1003", "1004"}
    assert {row["diverged"] for row in selection if row["lr"] == "10000.0"} == {"True"}
    assert [(row["lr"], row["seed"]) for row in rows[20:]] == [("0.03", seed) for seed in "3344"]
    shared, best = (folder / "table.md").read_text().split("## Each arm at its best learning rate")
    assert "| rmsnorm | post | 0.02 |" in shared and "| rmsnorm | post | 0.03 |" in best
    for arm in ("pre", "post"):
        there = [float(row["val_bpb"]) for row in selection if row["lr"] == "0.03" and row["placement"] == arm]
        assert f"| **{statistics.mean(there):.4f} (2)** | 2 of 2 diverged |" in shared
    assert {row["rates"] for row in csv_rows(folder, "table.csv")} == {"shared", "best"}
    assert (folder / "curves-best.png").exists() and (folder / "differences-best.png").exists()
