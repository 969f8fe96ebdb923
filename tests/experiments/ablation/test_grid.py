"""Which runs an ablation makes, with which commands, on which devices."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import ablate
import train
from data.batches import evaluation_batches
from experiments.ablation.factors import parse_factors
from experiments.ablation.grid import Cell, Grid, next_lr, settings_digest
from experiments.ablation.outcome import Arm
from experiments.ablation.page import ablation_page, plot_title
from experiments.ablation.processes import Process, end_with_parent, resolve_devices
from experiments.ablation.run import Ablation, resolve_ablation, run_ablation, write_probes
from experiments.probe import probe
from model import Llama
from runtime.checkpoint import load_pretrained
from runtime.process import IN_USE, exit_codes

FLAGS = "--dim 16 --layers 2 --heads 2 --context 16 --tokenizer bytes --dtype float32 --no-fast --device cpu"
ARM = Arm.of(norm="rmsnorm", placement="pre")


@pytest.fixture
def resolve(tmp_path):
    """An ablation of that text with more flags in one string. Nothing is trained."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sees a dog. " * 200)

    def resolved(flags: str = "") -> Ablation:
        common = f"{FLAGS} --data {text} --cache-dir {tmp_path / 'cache'} --out {tmp_path / 'out'}"
        return resolve_ablation(*ablate.parse(f"{common} {flags}".split()))

    return resolved


# --- factors ---------------------------------------------------------------------------------------------------------


def test_arms_are_the_product_of_all_factors(resolve):
    ablation = resolve("--norms rmsnorm dyt --factor batch-size=4,8 --factor tie-embeddings=true,false")
    assert [tuple(dict(arm.factors).values()) for arm in ablation.arms] == [
        (norm, "pre", batch, tied) for norm in ("rmsnorm", "dyt") for batch in "48" for tied in ("true", "false")
    ]
    for arm, (model_config, config) in ablation.grid.settings.items():
        assert model_config.norm == arm["norm"] and str(config.batch_size) == arm["batch_size"]
        assert model_config.tie_embeddings == (arm["tie_embeddings"] == "true")
    command = ablation.grid.command(ablation.reported[-1])
    parsed = train.parse(command[2:])
    assert (parsed.norm, parsed.batch_size, parsed.tie_embeddings, parsed.seed) == ("dyt", 8, False, 2)
    assert ablation.arms[0].name == "rmsnorm pre batch_size=4 tie_embeddings=true"


@pytest.mark.parametrize(
    "factor, named",
    [
        ("optimiser=muon,adamw", "'optimiser' is no option of train.py"),
        ("norm=rmsnorm,dyt", "use --norms"),
        ("placement=pre,post", "use --placements"),
        ("norm-args=eps=1", "use --norms KIND:KEY=VALUE"),
        ("lr=0.1,0.2", "use --lrs"),
        ("seed=1,2", "use --seeds"),
        *(
            (f"{name}=a,b", f"all runs of an ablation share --{name}")
            for name in ("out", "device", "cache-dir", "data", "tokenizer", "vocab-size", "eval-tokens", "fast")
        ),
        ("clip", "takes NAME=V1,V2"),
        ("clip=1,,2", "takes NAME=V1,V2"),
        ("clip=1,1", "all different"),
    ],
)
def test_what_is_no_factor_is_refused(factor, named):
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        parse_factors([factor])
    assert str(error.value).startswith(f"--factor {factor}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--factor clip=0,1 --factor clip=2", "clip is given twice"),
        ("--factor clip=0,1 --clip 1", "--clip is a factor here"),
        ("--factor tie-embeddings=yes,no", "takes true or false, not 'yes'"),
        ("--factor dropout=0,2", "--dropout must be at least 0 and below 1, not 2"),
        ("--widen 2", "--widen needs --lrs"),
        ("--widen -1 --lrs 0.1", "--widen must be 0 or more"),
        ("--equivalence 0", "--equivalence must be a positive number, not 0.0"),
        ("--equivalence nan", "--equivalence must be a positive number"),
        ("--device cpu:0,1", "--device 'cpu:0'"),
    ],
)
def test_bad_input_names_the_flag(flags, named, resolve):
    with pytest.raises(ValueError, match=re.escape(named)):
        resolve(flags)


@pytest.mark.parametrize("contexts", ["16,512", "512,16"])
def test_the_text_must_be_long_enough_for_the_context_of_every_arm(contexts, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sees a dog. " * 200)
    flags = FLAGS.replace("--context 16", f"--factor context={contexts}")
    arguments = f"{flags} --data {text} --cache-dir {tmp_path / 'cache'} --out {tmp_path / 'out'}".split()
    with pytest.raises(ValueError, match="--context 512 needs 513"):
        resolve_ablation(*ablate.parse(arguments))


def test_arms_never_mix_compiled_and_plain_runs_unawares(resolve, monkeypatch):
    """On a card, runs of 500 steps are compiled by default. `--factor compile` compares the two on purpose."""
    monkeypatch.setattr("runtime.run.compile_by_default", lambda device, steps: steps >= 500)
    with pytest.raises(ValueError, match="some arms would run with --compile and others without"):
        resolve("--factor steps=20,500")
    assert len(resolve("--factor steps=20,500 --no-compile").arms) == 2
    assert len(resolve("--factor compile=true,false").arms) == 2


# --- learning rates --------------------------------------------------------------------------------------------------


def finish(ablation: Ablation, cell: Cell, val_bpb: float, val_loss: float = 2.0) -> None:
    """Write the log of a run that has ended, after 1 second and 640 tokens."""
    folder = ablation.grid.cell_folder(cell)
    folder.mkdir(parents=True)
    training = {"train_loss": 2.0, "tokens_per_second": 1.0, "seconds": 1.0, "tokens": 640}
    rows = [training, {"val_loss": val_loss, "val_bpb": val_bpb}]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": ablation.common.steps} | row) + "\n" for row in rows)
    )


@pytest.mark.parametrize(("val_loss", "diverged"), [(5.5, False), (5.6, True)])
def test_a_run_that_ends_above_a_uniform_prediction_has_diverged(val_loss, diverged, resolve):
    """ln 257 = 5.549 nats."""
    ablation = resolve("--seeds 1")
    (cell,) = ablation.reported
    finish(ablation, cell, 2.0, val_loss)
    assert ablation.grid.outcomes([cell])[cell].diverged == diverged


def test_arms_may_differ_in_their_steps(resolve):
    grid = resolve("--factor steps=20,40 --seeds 1").grid
    names = [grid.checkpoint(Cell(arm, 0.01, 0)).name for arm in grid.settings]
    assert names == ["step-000020", "step-000040"]


def test_the_shared_rate_is_part_of_the_sweep(resolve):
    assert resolve("--lr 0.02 --lrs 0.01 0.03").lrs == [0.01, 0.02, 0.03]
    assert resolve("--lr 0.02").lrs == [] and resolve("--lr 0.02").selection == []


def test_the_grid_is_widened_while_the_best_rate_is_at_its_edge(resolve):
    """All runs that may be asked for have ended, so nothing is trained."""
    ablation = resolve("--lr 0.01 --lrs 0.02 --widen 3")
    for lr, bpb in ((0.01, 3.0), (0.02, 2.5), (0.04, 2.0), (0.08, 2.2)):
        for cell in ablation.grid.selection([ARM], [lr], 0):
            finish(ablation, cell, bpb)
    best, found = ablation.grid.select_lrs([ARM], ablation.lrs, 0, widen=3)
    assert best == {ARM: 0.04} and {cell.lr for cell in found} == {0.01, 0.02, 0.04, 0.08}
    best, found = ablation.grid.select_lrs([ARM], ablation.lrs, 0, widen=1)
    assert best == {ARM: 0.04} and {cell.lr for cell in found} == {0.01, 0.02, 0.04}


def test_a_command_that_is_repeated_reports_the_rates_beyond_the_grid_again(resolve, monkeypatch):
    """Nothing is trained the second time, so no run that ends says which rates were tried."""
    ablation = resolve("--lr 0.01 --lrs 0.02 --widen 1 --seeds 1")
    rates = {0.01: 3.0, 0.02: 2.5, 0.04: 2.0}
    for lr, bpb in rates.items():
        for cell in [*ablation.grid.selection([ARM], [lr], 0), Cell(ARM, lr, 0)]:
            finish(ablation, cell, bpb)
    monkeypatch.setattr("experiments.ablation.run.write_pictures", lambda grid, *runs: None)
    run_ablation(ablation, "command")
    assert "| arm | 0.01 | 0.02 | 0.04 |" in (ablation.folder / "table.md").read_text()
    with open(ablation.folder / "runs.csv", newline="") as file:
        selection = [float(row["lr"]) for row in csv.DictReader(file) if int(row["seed"]) >= 1000]
    assert sorted(selection) == sorted(2 * list(rates))


def test_each_arm_is_reported_at_its_own_rate_which_other_seeds_selected(resolve, monkeypatch):
    """All runs have ended, so nothing is trained. On the reported seeds, the other rate would be the better one."""
    ablation = resolve("--norms rmsnorm dyt --lr 0.01 --lrs 0.02 --seed 5 --seeds 2 --jobs 3")
    ablation = replace(ablation, grid=replace(ablation.grid, devices=("cpu", "auto")))
    dyt = Arm.of(norm="dyt", placement="pre")
    losses = {(ARM, 0.01): 2.0, (ARM, 0.02): 3.0, (dyt, 0.01): 3.5, (dyt, 0.02): 2.5}
    for cell in ablation.selection:
        finish(ablation, cell, losses[cell.arm, cell.lr])
    for (arm, lr), bpb in losses.items():
        for seed in (5, 6):
            finish(ablation, Cell(arm, lr, seed), 5 - bpb)
    drawn = []
    monkeypatch.setattr("experiments.ablation.run.write_pictures", lambda grid, *runs: drawn.extend(runs))
    run_ablation(ablation, "command")
    shared, best, sweep = ([(run.arm, run.lr, run.seed, run.val_bpb) for run in runs] for runs in drawn)
    assert shared == [(ARM, 0.01, 5, 3.0), (dyt, 0.01, 5, 1.5), (ARM, 0.01, 6, 3.0), (dyt, 0.01, 6, 1.5)]
    assert best == [(ARM, 0.01, 5, 3.0), (dyt, 0.02, 5, 2.5), (ARM, 0.01, 6, 3.0), (dyt, 0.02, 6, 2.5)]
    assert sorted({seed for _, _, seed, _ in sweep}) == [1005, 1006] and len(sweep) == 8
    with open(ablation.folder / "table.csv", newline="") as file:
        rows = [(row["rates"], row["norm"], row["lr"], row["difference"]) for row in csv.DictReader(file)]
    assert rows == [
        ("shared", "rmsnorm", "0.01", ""),
        ("shared", "dyt", "0.01", "-1.5"),
        ("best", "rmsnorm", "0.01", ""),
        ("best", "dyt", "0.02", "-0.5"),
    ]
    with open(ablation.folder / "runs.csv", newline="") as file:
        runs = [(row["norm"], row["lr"], row["seed"]) for row in csv.DictReader(file)]
    assert len(runs) == len(set(runs)) == 4 + 8 + 2 and ("dyt", "0.02", "6") in runs
    table = (ablation.folder / "table.md").read_text()
    shared_table, sweep_table, best_table = table.split("\n## ")[1:]
    assert "seeds 5 to 6, on " in table and "6 runs at a time on 2 cards" in table
    assert "(edge)" not in shared_table and "| 0.02 (edge) |" in best_table and "(edge)" in sweep_table
    assert "| val_bpb at 1 seconds (n) |" in shared_table


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_the_last_sample_of_each_arms_first_seed(resolve):
    ablation = resolve("--norms rmsnorm dyt --seeds 2")
    for number, cell in enumerate(ablation.reported):
        finish(ablation, cell, 2.0)
        samples = f"----- step 1 -----\nearly {number}\n----- step 2 -----\nlate {number}\n"
        (ablation.grid.cell_folder(cell) / "samples.txt").write_text(samples)
    html = ablation_page(ablation.grid, ablation.reported, "tables", {})
    assert re.findall("(?:early|late) .", html) == ["late 0", "late 1"]
    assert "<h3>rmsnorm pre</h3>" in html and "<h3>dyt pre</h3>" in html


def test_the_title_of_a_plot_says_what_was_run(resolve):
    """By hand: 257 × 16, per block 4 × 16² and 3 × 16 × 64, and five norms, of which each has 16 gains."""
    ablation = resolve("--factor steps=20,40 --factor tie-embeddings=true,false --seed 5 --seeds 2")
    for cell in ablation.reported:
        finish(ablation, cell, 2.0)
    runs = ablation.grid.outcomes(ablation.reported).values()
    size = 257 * 16 + 2 * (4 * 16**2 + 3 * 16 * 64) + 5 * 16
    title = plot_title(ablation.grid.settings, runs, "some rate")
    assert title == f"{size:,} to {size + 257 * 16:,} parameters, 20 to 40 steps, some rate, seeds 5 to 6"


# --- the probe -------------------------------------------------------------------------------------------------------


def test_the_probe_sees_the_weights_before_and_after_training_of_each_seed(resolve, monkeypatch):
    ablation = resolve("--seed 3 --seeds 2 --steps 2 --batch-size 4 --dropout 0.5")
    grid = ablation.grid
    for cell in ablation.reported:
        train.main(grid.command(cell)[2:])
    drawn: list[Any] = []

    def keep(blocks: list[Any], title: str) -> Figure:
        drawn.extend(blocks)
        return Figure()

    monkeypatch.setattr("experiments.ablation.run.plot_depth", keep)
    write_probes(ablation, grid.outcomes(ablation.reported))
    batch = next(evaluation_batches(grid.data.val.tokens, 16, 4))
    expected = []
    for cell in ablation.reported:
        trained = load_pretrained(grid.cell_folder(cell) / "checkpoints" / "step-000002", "cpu")[0]
        for when, model in (("start", Llama(grid.settings[ARM][0], cell.seed)), ("end", trained)):
            torch.manual_seed(cell.seed)  # for dropout
            expected += [(cell.seed, when, block) for block in probe(model, *batch)]
    assert drawn == [(ARM, when, block) for _, when, block in expected]
    with open(ablation.folder / "probe.csv", newline="") as file:
        rows = [(row["seed"], row["when"], row["block"], float(row["grad_norm"])) for row in csv.DictReader(file)]
    assert rows == [(str(seed), when, str(block.block), block.grad_norm) for seed, when, block in expected]


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cards(monkeypatch):
    """A machine with these cards, of which only the names exist."""

    def have(*names: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[torch.device(device).index or 0])

    return have


def test_several_cards(cards):
    cards("H100", "H100", "L4")
    assert resolve_devices("cuda:0,1") == ("cuda:0", "cuda:1")
    assert resolve_devices("cuda:1") == ("cuda:1",)
    for device, named in (
        ("cuda:0,2", "mixes H100 and L4"),
        ("cuda:0,0", "names a card twice"),
        ("cuda:0,3", "the last of this machine's GPUs is cuda:2"),
        ("cuda:0,", "choose auto, cpu, cuda"),
        ("cuda,1", "choose auto, cpu, cuda"),
    ):
        with pytest.raises(ValueError, match=named):
            resolve_devices(device)


def test_each_run_gets_a_device_of_its_own_and_resumes_on_another(resolve):
    grid, cell = replace(resolve().grid, devices=("cuda:0", "cuda:1")), Cell(ARM, 0.01, 0)
    command = grid.command(cell, "cuda:1")
    assert command[-4:] == ["--device", "cuda:1", "--out", str(grid.cell_folder(cell))]
    assert train.parse(command[2:]).device == "cuda:1" and train.parse(command[2:]).lr == 0.01
    grid.cell_folder(cell).mkdir()
    (grid.cell_folder(cell) / "run.json").touch()
    resumed = train.parse(grid.command(cell, "cuda:0")[2:])
    cache = train.parse(grid.train_flags).cache_dir  # a run.json does not say where to write
    assert vars(resumed).items() >= {"resume": True, "device": "cuda:0", "cache_dir": cache}.items()
    assert resumed.out == str(grid.cell_folder(cell))


def test_runs_wait_for_a_free_place_and_for_a_folder_in_use(resolve, monkeypatch):
    """Two at a time on each of two devices. The first one finds its folder locked at first, and is started again."""
    started: list[tuple[int, str]] = []
    processes: list[Process] = []
    at_once: list[int] = []

    def start(grid: Grid, cell: Cell, device: str) -> Process:
        started.append((cell.seed, device))
        code = IN_USE if len(started) == 1 else 0
        if code == 0:
            finish(ablation, cell, 2.0)
        processes.append(Process(["sh", "-c", f"sleep 0.3; exit {code}"], ablation.folder / "log", 1))
        at_once.append(sum(process.poll() is None for process in processes))
        return processes[-1]

    monkeypatch.setattr(Grid, "start", start)
    monkeypatch.setattr("experiments.ablation.grid.POLL_SECONDS", 0.1)
    ablation = resolve("--seeds 5 --jobs 2")
    wanted = ablation.reported
    outcomes = replace(ablation.grid, devices=("one", "other")).run(wanted)
    assert started[:4] == [(0, "one"), (1, "other"), (2, "one"), (3, "other")] and max(at_once) == 4
    assert sorted(seed for seed, _ in started[4:]) == [0, 4]
    assert list(outcomes) == wanted and not any(outcome.diverged for outcome in outcomes.values())


def test_progress_is_read_from_the_end_of_a_log(resolve):
    """Not from its beginning, which is not even JSON here, and not from a line that is still being written."""
    ablation = resolve("--seeds 1")
    (cell,) = ablation.reported
    assert ablation.grid.steps_done(cell) == 0
    rows = [json.dumps({"step": step, "train_loss": 2.0 / 3, "seconds": step / 3}) for step in range(1, 10_001)]
    ablation.grid.cell_folder(cell).mkdir(parents=True)
    log = ablation.grid.cell_folder(cell) / "metrics.jsonl"
    for end in ("", '{"step": 1', '{"step": 10001, "tr'):
        log.write_text("not JSON\n" + "".join(row + "\n" for row in rows) + end)
        assert ablation.grid.steps_done(cell) in (10_000, 10_001)
    log.write_text("")
    assert ablation.grid.steps_done(cell) == 0


def test_the_folder_does_not_depend_on_the_card(resolve):
    settings = resolve().grid.settings
    digests = [
        settings_digest({arm: (model, replace(config, device=device)) for arm, (model, config) in settings.items()})
        for device in ("cuda:0", "cuda:1", "cuda", "cpu")
    ]
    assert digests[0] == digests[1] == digests[2] != digests[3]


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_process_gets_its_threads_and_appends_to_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    script = 'echo "$OMP_NUM_THREADS $MKL_NUM_THREADS"; echo error >&2'
    process = Process(["sh", "-c", script], log, threads=3)
    assert process.wait() == 0 and process.last_line() == "error"
    assert log.read_text() == "before\n3 3\nerror\n"


def test_a_process_that_fails_on_a_full_disk(tmp_path, monkeypatch):
    """It cannot even say so in its log."""
    process = Process(["sh", "-c", "echo 'step 3: val_loss 5.4'; exit 1"], tmp_path / "log", 1)
    assert process.wait() == 1
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    assert process.last_line() == f"error: it failed, and could not say why: {tmp_path} has 0 bytes free"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'error: a.bin needs 5 bytes' >&2; exit 1", "a.bin needs 5 bytes"),
        ("echo 'train.py: error: no flag' >&2; exit 2", "train.py: error: no flag"),
        ("echo 'step 3: val_loss 5.4'; exit 3", "exit code 3; its last line is step 3: val_loss 5.4"),
        ("echo 'error: a.bin needs 5 bytes' >&2; echo warning; exit 1", "a.bin needs 5 bytes"),
        ("exit 3", "exit code 3"),
        ("echo 'warning: careful' >&2; echo >&2; exit 1", "exit code 1; its last line is warning: careful"),
        (r"printf 'error: \351t\351' >&2; exit 1", "\ufffdt\ufffd"),  # not UTF-8
        ("kill -9 $$", "killed by SIGKILL"),
    ],
)
def test_the_reason_of_a_failed_cell(script, expected, resolve, monkeypatch, capsys):
    monkeypatch.setattr(Grid, "command", lambda *_: ["sh", "-c", script])
    ablation = resolve("--seeds 1")
    with pytest.raises(SystemExit) as exit, exit_codes(""):
        ablation.grid.run(ablation.reported)
    log = f"{ablation.grid.cell_folder(ablation.reported[0])}.log"
    assert capsys.readouterr().err.endswith(f"error: {log}: {expected}\n")
    assert exit.value.code == (int(script[-1]) if "exit" in script else 1)


@pytest.mark.skipif(not end_with_parent(), reason="needs setpriv, as on Linux")
def test_a_process_is_told_when_its_parent_was_killed(tmp_path):
    """It gets SIGTERM from the kernel, once or more: for each thread of the parent that was its parent in turn."""
    log = tmp_path / "log"
    child = "trap 'echo stopped; exit' TERM; echo ready; while true; do sleep 0.05; done"
    parent = (
        "import os, signal, time; from pathlib import Path; from experiments.ablation.processes import Process\n"
        f"log = Path({str(log)!r}); process = Process(['sh', '-c', {child!r}], log, 1)\n"
        "while 'ready' not in log.read_text(): time.sleep(0.02)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", parent], cwd=Path(train.__file__).parent, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while "stopped" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "stopped" in log.read_text()


# --- learning rates --------------------------------------------------------------------------------------------------


def test_rates_are_never_selected_on_seeds_that_are_reported(resolve):
    ablation = resolve("--norms rmsnorm dyt --lrs 0.1 0.2 --seeds 1000 --seed 3")
    assert not {cell.seed for cell in ablation.selection} & {cell.seed for cell in ablation.reported}


@pytest.mark.parametrize(
    "lrs, best, expected",
    [([1.0, 3.0], 3.0, 9.0), ([1.0, 3.0], 1.0, 0.333), ([1.0, 3.0, 6.0], 3.0, None), ([1.0], 1.0, None)],
)
def test_the_next_rate_continues_the_spacing_of_the_grid(lrs, best, expected):
    assert next_lr(lrs, best) == expected
