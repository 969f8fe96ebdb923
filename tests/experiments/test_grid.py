"""Which runs an ablation makes, with which commands, on which devices. Runs are made up, or train in this process."""

import json
import math
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, get_origin

import pytest
import torch

import ablate
import runtime.run
from config import FIELDS, configure, flag_name
from experiments.ablation import resolve_ablation, run_ablation
from experiments.arms import ladder, resolve_arms, resolve_factors
from experiments.grid import Cell, Grid, resolve_devices
from experiments.rates import Optimum
from experiments.records import RESUMED_WITH, Arm, read_csv
from files import warned
from machine.process import NotFinite, Stopped, exit_codes
from model import Llama
from runtime.flags import read_train
from runtime.run_dir import write_run_file

FLAGS = "--dim 16 --layers 2 --heads 2 --batch-size 4 --tokenizer bytes --device cpu --lr 0.01 --steps 4"
ARM, DYT = (Arm.of(norm=norm, placement="pre") for norm in ("rmsnorm", "dyt"))


@pytest.fixture
def resolve(tmp_path):
    """An ablation with more flags in one string, of ARM if they name no others. Nothing is trained."""
    (tmp_path / "text.txt").write_text("the cat sees a dog. " * 200)
    common = f"{FLAGS} --dtype float32 --context 16 --data {tmp_path / 'text.txt'} --cache-dir {tmp_path / 'cache'}"

    def resolve(flags: str = "", out: str = f"--out {tmp_path / 'out'}") -> Grid:
        own = {"--norms": "rmsnorm", "--placements": "pre"} if "recipe" not in flags else {}
        rest = " ".join(f"{flag} {value}" for flag, value in own.items() if flag not in flags)
        return resolve_ablation(*ablate.parse(f"{common} {out} {rest} {flags}".split()))

    return resolve


def finish(grid: Grid, cell: Cell, bpb: float) -> None:
    """Write the log of a run that has ended, or diverged."""
    folder = grid.cell_folder(cell)
    folder.mkdir(parents=True)
    last = {"val_loss": 2.0, "val_bpb": bpb} if bpb < math.inf else {"not_finite": True}
    rows = [{"step": grid.configs[cell.arm][1].steps} | row for row in ({"train_loss": 2.0, "seconds": 1.0}, last)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_arms_are_the_product_of_all_factors(resolve):
    flags = "--norms rmsnorm dyt:alpha=0.5 --placements mhc:streams=1 --factor clip=0,8 "
    grid = resolve(flags + "--factor tie-embeddings=true,false --watch 3")
    assert [tuple(value for _, value in arm.factors) for arm in grid.configs] == [
        (norm, "mhc:streams=1", clip, tied)
        for norm in ("rmsnorm", "dyt:alpha=0.5") for clip in "08" for tied in ("true", "false")
    ]  # fmt: skip
    cell = grid.reported(dict.fromkeys(grid.configs, Optimum(0.02, None)))[-1]
    expected: dict[str, Any] = {"norm": "dyt", "norm_args": {"alpha": 0.5}, "clip": 8.0, "tie_embeddings": False}
    expected |= {"placement": "mhc", "placement_args": {"streams": 1}, "lr": 0.02, "seed": 2, "compile": False}
    assert read_train(grid.command(cell)[2:]).items() >= (expected | {"watch": 3}).items()
    assert cell.arm.name == "dyt:alpha=0.5 mhc:streams=1 clip=8 tie_embeddings=false"


def test_arms_of_recipes_are_single_runs(resolve):
    """At the same sizes, with a norm or a placement only if it is asked for, then also over the recipe's."""
    grid = resolve("--factor recipe=llama,gemma2,olmo,nanochat --factor clip=1,2")
    assert [arm.name for arm in grid.configs][2:4] == ["gemma2 clip=1", "gemma2 clip=2"]
    for arm, configs in grid.configs.items():
        recipe, clip = (value for _, value in arm.factors)
        flags = f"{FLAGS} --recipe {recipe} --clip {clip} --context 16 --dtype float32"
        single = runtime.run.fields_of(*runtime.run.resolve(read_train(flags.split()))[1:3])
        found = runtime.run.fields_of(*configs)
        assert {name for name in single if single[name] != found[name]} == {"data", "cache_dir"}
    for flags, norms in (("", {"rmsnorm", "layernorm"}), ("--norms dyt", {"dyt"}), ("--norms rmsnorm", {"rmsnorm"})):
        models = [model for model, _ in resolve(f"--factor recipe=gemma2,olmo {flags}").configs.values()]
        assert {model.norm for model in models} == norms
        assert [model.placement for model in models] == ["sandwich", "pre"]


def test_an_arm_has_the_arguments_that_its_name_says_and_the_options_of_a_run(resolve, tmp_path):
    asked: dict[str, Any] = {"norm": "dyt", "norm_args": {"alpha": 0.3}, "clip": 3.0}
    resolved = runtime.run.fields_of(*configure(asked))
    write_run_file(tmp_path / "run.json", {"asked": asked, "resolved": resolved, "imports": []})
    grid = resolve(f"--config {tmp_path / 'run.json'} --norms dyt:alpha=2 rmsnorm dyt")
    found = [(model.norm_args, config.clip) for model, config in grid.configs.values()]
    assert found == [({"alpha": 2}, 3.0), ({}, 3.0), ({}, 3.0)]


def test_arms_share_a_column_and_a_validation_text_and_count_the_tokens_of_whole_batches(resolve, tmp_path):
    data, val = tmp_path / "both.jsonl", tmp_path / "text.txt"
    data.write_text(json.dumps({"a": "the cat sees a dog. " * 200, "b": "a bird hears the dog. " * 200}))
    grid = resolve(f"--text-column b --val-data {val} --micro-batch-size 2 --data {data}")
    assert [bytes(part[:6].tolist()) for part in (grid.data.train, grid.data.val)] == [b"a bird", b"the ca"]
    asked = read_train(grid.command(Cell(ARM, 0.01, 0))[2:])
    assert (asked["text_column"], asked["val_data"]) == ("b", [str(val)])
    assert [costs["tokens"] for costs in grid.costs.values()] == [4 * 4 * 16]  # steps, rows and context


def test_unsupported_arms_are_skipped_with_the_reason_and_batches_alone_are_refused():
    wanted = [Arm.of(norm=norm, placement=place) for norm in ("rmsnorm", "none") for place in ("post", "mix")]
    found = resolve_arms(wanted, {"device": "cpu", "dtype": "float32"})
    assert list(found) == wanted[:2]
    assert [line[:22] for line in warned[-2:]] == ["skipped: none post, as", "skipped: none mix, as "]
    with pytest.raises(ValueError, match=r"^the first arm, none post, is the baseline .*; choose pre or rezero"):
        resolve_arms(wanted[2:], {"device": "cpu", "dtype": "float32"})
    with pytest.raises(ValueError, match="or context alone: only runs with the same batches are"):
        resolve_factors(["rmsnorm"], [], ["context=8,16", "batch-size=4,8"], {})
    assert len(resolve_factors(["rmsnorm", "dyt"], [], ["context=8,16"], {})) == 4


def test_a_size_has_heads_and_steps_for_its_width(text, capsys):
    shared = read_train(f"--data {text} --tokenizer bytes --layers 2 --head-dim 16 --batch-size 4 --context 8".split())
    arms = ladder([64, 32], [Arm.of(norm="rmsnorm"), Arm.of(norm="dyt:alpha=1")], shared, 3.0)
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count(" parameters, 3 tokens for each")) == ("", 2)  # --print-commands has stdout
    configs = resolve_arms(arms, shared | {"dtype": "float32", "device": "cpu"})
    assert [arm.name for arm in configs][1:3] == ["dim=32 dyt:alpha=1", "dim=64 rmsnorm"]
    for (model, config), dim in zip(configs.values(), (32, 32, 64, 64), strict=True):
        first = Llama(dim=dim, layers=2, heads=dim // 16, vocab_size=257)
        tokens = 3.0 * sum(weight.numel() for weight in first.parameters())
        assert (model.dim, model.heads, config.steps) == (dim, dim // 16, round(tokens / (4 * 8)))
    with pytest.raises(ValueError, match="40 must be a multiple of the size of a head, 16; --head-dim sets it"):
        ladder([32, 40], arms[:1], shared, 3.0)
    with pytest.raises(ValueError, match="--steps follows from --ladder; leave it out"):
        ladder([32, 64], [Arm.of(steps="4")], shared, 3.0)
    with pytest.raises(ValueError, match="--ladder derives --hidden-dim from the width, and"):
        ladder([2048, 4096], arms[:1], {"preset": "1b"}, 3.0)


def test_each_arm_has_the_rates_of_its_sizes(text, tmp_path):
    """--lrs are those of the first arm's. A folder that was begun at one rate for all keeps it."""

    def rates(flags: str) -> list[list[float]]:
        files = f"--data {text} --cache-dir {tmp_path} --out {tmp_path / 'out'}"
        made = f"--layers 1 --context 16 --tokenizer bytes --device cpu {files} {flags}"
        return [[*rates] for rates in resolve_ablation(*ablate.parse(made.split())).lrs.values()]

    assert rates("--factor dim=128,256,96") == [[0.015], [0.00776], [0.0197]]
    assert rates("--factor dim=256,128 --lrs 0.01 0.02") == [[0.00776, 0.01, 0.02], [0.015, 0.0193, 0.0386]]
    assert rates("--factor dim=256,128 --lrs 0.02 --lr 0.03") == [[0.02, 0.03], [0.03, 0.0386]]
    assert rates("--factor optimizer=muon,adamw --dim 256 --lrs 0.1") == [[0.00776, 0.1], [0.015, 0.1]]
    assert rates("--ladder 64 192 --head-dim 32 --lrs 0.01") == [[0.01, 0.0144], [0.00467, 0.00673]]
    (tmp_path / "out/cells/dim=256-lr0.015-seed0").mkdir(parents=True)
    assert rates("--factor dim=128,256,96") == [[0.015], [0.015], [0.0197]]


def test_steps_of_equal_time_are_kept_when_the_ablation_continues_or_gets_arms(resolve, monkeypatch):
    """Each measurement says something else. They are in the command of a run."""
    times = iter([[1.0, 2.0], [1.0, 9.0, 0.5]])

    def measured(arms: Any, _: int) -> dict[Arm, tuple[float, int, int]]:
        return {arm: (seconds, 0, 0) for arm, seconds in zip(arms, next(times), strict=True)}

    monkeypatch.setattr("experiments.ablation.step_times", measured)
    flags = "--steps 40 --warmup 10 --equal time --norms"
    for norms in ("rmsnorm dyt", "rmsnorm dyt", "rmsnorm dyt derf"):
        grid = resolve(f"{flags} {norms}")
        assert [config.steps for _, config in grid.configs.values()] == [40, 20, 80][: len(grid.configs)]
    asked = read_train(grid.command(Cell(DYT, 0.01, 0))[2:])
    assert (asked["steps"], asked["warmup"]) == (20, 5)
    assert [costs["step_time"] for costs in grid.costs.values()] == [1.0, 2.0, 0.5]
    wrong = {"dyt rmsnorm": "baseline rmsnorm pre, not dyt pre", "rmsnorm dyt --steps 50": "steps 40, not 50"}
    for more, message in (wrong | {"rmsnorm dyt --equal flops": "equal time, not flops"}).items():
        with pytest.raises(ValueError, match=f"was made with {message}; choose another --out"):
            resolve(f"{flags} {more}")


def test_without_out_the_folder_follows_from_what_is_compared(resolve, monkeypatch, tmp_path):
    """The same command continues, also with more seeds or learning rates. Another comparison gets another folder."""
    monkeypatch.chdir(tmp_path)

    def folder(flags: str) -> Path:
        return resolve(flags, out="").folder

    first = folder("--norms rmsnorm layernorm")
    same = ["--seeds 4", "--lrs 0.1 0.2", "--save-every 7 --keep 1 --jobs 2 --watch 9"]
    assert {folder(f"--norms rmsnorm layernorm {flags}") for flags in same} == {first}
    others = ["--norms rmsnorm", "--norms rmsnorm layernorm --steps 5", "--norms rmsnorm layernorm --equal flops"]
    assert len({folder(flags) for flags in others} | {first}) == 4
    flags = f"{FLAGS} --dtype float32 --norms rmsnorm dyt --data text.txt"
    assert resolve_ablation(*ablate.parse(flags.split())).folder.name == "ablation-4303d0d1"  # as at 5a132b0
    with pytest.raises(ValueError, match="split has at most"):  # the text is too short for the second arm
        resolve_ablation(*ablate.parse(f"{flags} --factor context=16,9999".split()))


def test_every_option_that_can_change_a_result_must_be_that_of_the_run(resolve):
    """Micro-batches change rounding only. Texts and tokenizers have hashes, and folders name rate and seed."""
    grid, cell = resolve("--seeds 1"), Cell(ARM, 0.01, 0)
    model, config = grid.configs[ARM]
    resolved = runtime.run.fields_of(model, replace(config, seed=0))
    file = grid.cell_folder(cell) / "run.json"
    file.parent.mkdir()
    run: dict[str, Any] = {"asked": {}, "imports": [], "device": "CPU", "instruction_set": "AVX2", "commit": "abc"}
    run |= {"versions": {"torch": "2"}, "corpus": {"name": grid.data.corpus_name, "hash": grid.data.corpus_hash}}
    run |= {"tokenizer": {"kind": "bytes", "hash": grid.data.tokenizer.hash}}
    free = {*RESUMED_WITH, "out", "data", "val_data", "text_column", "tokenizer", "micro_batch_size", "lr", "seed"}
    for name, value in resolved.items():
        others: dict[Any, Any] = {bool: not value, int: 77, float: 0.77, str: "other", list: ["x"], dict: {"eps": 1}}
        other = (others | {UnionType: 3.0})[get_origin(FIELDS[name].type) or FIELDS[name].type]
        write_run_file(file, run | {"resolved": resolved | {name: other}})
        flag = flag_name(name.removesuffix("_args") if name in ("norm_args", "placement_args") else name)
        with nullcontext() if name in free else pytest.raises(ValueError, match=f"has {flag} "):
            grid.record(cell)
    for name, flag in (("corpus", "data"), ("tokenizer", "tokenizer")):
        write_run_file(file, run | {name: run[name] | {"hash": "another"}, "resolved": resolved})
        with pytest.raises(ValueError, match=f"the run in .* has --{flag} .*@another, not .*; choose another --out"):
            resolve("--seeds 1 --seed 0")
    write_run_file(file, run | {"corpus": run["corpus"] | {"name": "renamed"}, "resolved": resolved})
    grid.record(cell)
    write_run_file(file, run | {"resolved": resolved | {"cuda_graph": False}})  # of 5a132b0
    resolve("--seeds 1")
    write_run_file(file, run | {"resolved": resolved | {"device": "cuda:1"}})  # a card is as good as another
    replace(grid, configs={ARM: (model, replace(config, device="cuda:0"))}).record(cell)


def test_each_arm_is_reported_at_its_vertex_with_fresh_seeds(resolve, monkeypatch):
    """All runs have ended, so nothing is trained. The second arm's vertex is outside, so it tries one more rate."""
    grid = resolve("--norms rmsnorm dyt --lrs 0.005 0.02 0.04 0.08 --seed 5 --seeds 2 --watch 3")
    for arm, vertex, found, more in ((ARM, 0.02, 0.02, []), (DYT, 0.1, 0.121, [0.128])):
        for seed in (5, 6):
            finish(grid, Cell(arm, found, seed), 2.0)
        for number, lr in enumerate([*grid.lrs[arm], *more]):
            finish(grid, Cell(arm, lr, 1005), 2 + 0.02 * math.log(lr / vertex) ** 2 + 0.005 * (-1) ** number)
    monkeypatch.setattr(Grid, "start", lambda grid, cell, device: pytest.fail(f"{cell.name} would be trained"))
    (grid.cell_folder(Cell(ARM, 0.01, 7)) / "run.json").parent.mkdir()
    (grid.cell_folder(Cell(ARM, 0.01, 7)) / "run.json").touch()
    warned.clear()
    assert run_ablation(grid, "command")[0].startswith("Compared with rmsnorm, each at its own best learning rate: dyt")
    rates, begin, watch, left_out = dict.fromkeys(warned)
    assert rates == "lr 0.005 0.01 0.02 0.04 0.08: rmsnorm pre, dyt pre"
    assert begin == "search: 10 runs at first, in all usually 1.2 to 3 times as many, and at most 98"
    assert watch.startswith("--watch: runs that have ended ") and left_out.endswith("no longer asked for: 1")
    rows = [(run.arm.name, run.lr, run.seed) for run in read_csv(grid.folder / "runs.csv")]
    assert rows[:4] == [(norm, lr, seed) for seed in (5, 6) for norm, lr in (("rmsnorm", 0.02), ("dyt", 0.121))]
    assert len(rows) == 4 + 11 and {seed for _, _, seed in rows[4:]} == {1005}
    monkeypatch.setattr("experiments.grid.WIDEN", 0)
    assert (grid.tune()[DYT].lr, grid.tune()[DYT].regret) == (0.08, None)


def test_a_stopped_ablation_reports_what_has_ended_and_continues(resolve, monkeypatch):
    """A run that diverged has ended."""
    started: list[int] = []

    def start(grid: Grid, cell: Cell, device: str) -> SimpleNamespace:
        started.append(cell.seed)
        finish(grid, cell, math.inf if cell.seed == 3 else 2.0)
        signal.raise_signal(signal.SIGTERM)
        return SimpleNamespace(terminate=lambda: None, wait=lambda: None)

    monkeypatch.setattr(Grid, "start", start)
    grid = resolve("--seed 3 --seeds 3 --jobs 1")
    for partial in ("1 of 3", "2 of 3"):
        with pytest.raises(Stopped, match="the same command"):
            run_ablation(grid, "command")
        assert (grid.folder / "table.md").read_text().startswith(f"**Partial: {partial} runs ended.**")
    assert started == [3, 4]
    finish(grid, Cell(ARM, 0.01, 5), 2.0)
    assert "Partial" not in run_ablation(grid, "command")[0]
    assert [run.diverged for run in read_csv(grid.folder / "runs.csv")] == [True, False, False]


def test_runs_wait_for_a_free_place(resolve, monkeypatch):
    """Two at a time on each of two devices, whether they diverge or not."""
    started: list[tuple[int, str]] = []
    running: list[int] = []

    def start(grid: Grid, cell: Cell, device: str) -> SimpleNamespace:
        started.append((cell.seed, device))
        running.append(cell.seed)
        assert len(running) <= 4
        finish(grid, cell, math.inf if cell.seed == 1 else 2.0)
        return SimpleNamespace(returncode=NotFinite.code if cell.seed == 1 else 0, poll=lambda: running.pop() * 0)

    monkeypatch.setattr(Grid, "start", start)
    monkeypatch.setattr("experiments.grid.POLL_SECONDS", 0.0)
    grid = resolve("--seeds 6 --jobs 2")
    wanted = grid.reported(grid.tune())
    assert list(replace(grid, devices=("one", "other")).run(wanted)) == wanted
    assert started == [(0, "one"), (1, "other"), (2, "one"), (3, "other"), (4, "one"), (5, "other")]


@pytest.mark.parametrize(
    "script, code, expected",
    [
        ('echo "error: $OMP_NUM_THREADS and $MKL_NUM_THREADS" >&2; echo warning; exit 2', 2, "exit code 2: 3 and 3"),
        (r"printf '1\n\351t\351'; kill -9 $$", 1, "exit code -9: \ufffdt\ufffd"),  # not UTF-8
    ],
)
def test_a_cell_that_fails_ends_the_ablation_with_its_exit_code(script, code, expected, resolve, monkeypatch, capsys):
    """The runs that have ended are reported. A run gets its threads and a new log."""
    monkeypatch.setattr(Grid, "command", lambda *_: ["sh", "-c", script])
    grid = resolve("--seeds 2 --jobs 1")
    finish(grid, Cell(ARM, 0.01, 0), 2.0)
    log = grid.log(Cell(ARM, 0.01, 1))
    log.write_text("error: before\n" * 2)
    with pytest.raises(SystemExit) as exit, exit_codes(""):
        run_ablation(replace(grid, threads=3), "command")
    assert capsys.readouterr().err.endswith(f"error: {log}: {expected}\n") and exit.value.code == code
    assert "**Partial: 1 of 2 runs ended.**" in (grid.folder / "table.md").read_text()


def test_several_cards(monkeypatch, resolve):
    """A run resumes on the card that is free."""
    monkeypatch.setattr(torch.version, "cuda", None)  # a build for CUDA, without a driver
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_devices("cuda:0,1") == ("cuda:0", "cuda:1") and resolve_devices("cuda:1") == ("cuda:1",)
    for device, named in (("cuda:0,2", "cuda:2: .* no such device"), ("cuda,1", "choose auto")):
        with pytest.raises(ValueError, match=named):
            resolve_devices(device)
    grid, cell = resolve(), Cell(ARM, 0.01, 0)
    assert read_train(grid.command(cell, "cuda:1")[2:])["device"] == "cuda:1"
    grid.cell_folder(cell).mkdir()
    (grid.cell_folder(cell) / "run.json").touch()
    resumed = read_train(grid.command(cell, "cuda:0")[2:])
    assert resumed.keys() == {*RESUMED_WITH, "resume", "device", "out"} and resumed["device"] == "cuda:0"
