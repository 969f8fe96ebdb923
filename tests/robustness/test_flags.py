"""Random flags: every combination works or is refused in one line, and nothing is created then."""

import dataclasses
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import pytest
import torch

import ablate
import bench
import generate
import train
from config import PRESETS, ModelConfig, TrainConfig, configs_from
from experiments.ablation.run import resolve_ablation
from generate import Sampling
from norms import KINDS
from norms.placement import PLACEMENTS
from runtime.device import pick_device
from runtime.process import bad_input, exit_codes
from runtime.run import resolve_settings

PLAUSIBLE: dict[Any, list[str]] = {int: ["1", "2", "4", "8", "32"], float: ["0.5", "0.1", "0.01", "1", "1e-5"]}
ODD: dict[Any, list[str]] = {
    int: [
        "0", "-1", "-2147483648", "2147483647", "2147483648", "9223372036854775808", "1" + "0" * 30, "1" * 5000, "1.5",
        "1e3", "", " ", "nan", "x", "１", "1_0", "٣", "--", "0x10", "True",
    ],
    float: [
        "0", "-0.0", "-1", "1e-320", "1e-300", "1e300", "1e400", "nan", "inf", "-inf", "-nan", "", "x", "1,5", "１",
        "1_0",
    ],
    str: [
        "", " ", "x", "é", "日本", "\x1b[2J", "a\nb", "\udcff", "-1", "x" * 5000, "../x", "=", "%s", "{}", "cpu:0",
        "cuda:9",
    ],
}  # fmt: skip
PAIRS = {
    "norm_args": [
        "eps=1e-5", "eps=0", "eps=nan", "eps=", "eps", "=", "bias=false", "bias=1", "x=1",
        "zero_centered=true",
    ],
    "rope_scaling": [
        "factor=8", "low_freq_factor=1", "high_freq_factor=4", "original_max_position_embeddings=16", "factor=x",
        "factor", "factor=nan", "x=1",
    ],
}  # fmt: skip
NAMES = {"norm_args": "norm-arg"}

Option = Callable[[random.Random], list[str]]  # a random use of it


def options_of(config: type) -> dict[str, Option]:
    """The flags of a dataclass of options."""
    hints = get_type_hints(config)
    return {field.name: option(field, hints[field.name]) for field in dataclasses.fields(config)}


def option(field: dataclasses.Field, kind: Any) -> Option:
    flag = f"--{NAMES.get(field.name, field.name.replace('_', '-'))}"
    choices = list(field.metadata.get("choices") or [])
    plausible = choices or PLAUSIBLE.get(kind, [])
    return use(flag, kind, plausible + (PAIRS[field.name] if get_origin(kind) is dict else []))


def use(flag: str, kind: Any, plausible: list[str]) -> Option:
    def draw_value(draw: random.Random) -> list[str]:
        if kind is bool:
            return [draw.choice([flag, flag.replace("--", "--no-", 1)])]
        if draw.random() < 0.02:
            return [flag]  # without a value
        odd = draw.random() < 0.06 or not plausible
        value = draw.choice(ODD.get(kind, ODD[str]) if odd else plausible)
        return [f"{flag}={value}"] if draw.random() < 0.5 else [flag, value]

    return draw_value


def arguments(options: dict[str, Option], draw: random.Random) -> list[str]:
    names = draw.sample(sorted(options), min(len(options), draw.choice([1, 1, 2, 3, 5, 8])))
    return [part for name in names for part in options[name](draw)]


@pytest.fixture
def place(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a cache and nothing else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    return tmp_path


def tree(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "cache" not in path.relative_to(folder).parts}


class Tried:
    """What happened to the combinations of one command."""

    def __init__(self, place: Path, ends: Callable):
        self.place, self.ends, self.codes = place, ends, dict[int, int]()
        self.slowest = 0.0

    def run(self, command: Callable[[list[str]], Any], flags: list[str]) -> int:
        """Run a command, and raise AssertionError unless it works or is refused as promised."""
        before, started, threads = tree(self.place), time.perf_counter(), torch.get_num_threads()
        code, error = self.ends(command, flags)
        torch.set_num_threads(threads)  # which an ablation changes
        self.codes[code] = self.codes.get(code, 0) + 1
        self.slowest = max(self.slowest, time.perf_counter() - started)
        full = code == 1 and "bytes free" in error  # a model too large for this disk
        assert (code in (0, 2, 3, 5) or full) and "Traceback" not in error, (flags, code, error)
        if code:
            lines = error.splitlines()
            assert "error: " in lines[-1] and len(lines[-1]) < 2500, (flags, error)
            assert sum("error: " in line for line in lines) == 1, (flags, error)
        if code == 2:
            assert tree(self.place) == before, (flags, tree(self.place) - before)
        return code


def validator(flags: list[str]) -> None:
    """What train.py does before it makes a model."""
    with exit_codes("x"):
        given = train.parse(flags)
        with bad_input():
            print(train.plan(given)) if given.plan else resolve_settings(given)


def ablation_validator(flags: list[str]) -> None:
    with exit_codes("x"):
        given, train_flags = ablate.parse(flags)
        with bad_input():
            folder = resolve_ablation(given, train_flags).folder
        shutil.rmtree(folder)


def bench_validator(flags: list[str]) -> None:
    with exit_codes("x"):
        given = bench.parse(flags)
        with bad_input():
            pick_device(bench.make_config(given).device)


def is_small(flags: list[str]) -> bool:
    """Whether two steps take a second."""
    model, config = configs_from(train.parse(flags), "cpu")
    small = model.weights < 10**6 and model.layers < 20 and model.context < 100 and model.head_dim < 1000
    return small and config.batch_size < 65 and not config.compile and config.log == "none"


TRAIN = options_of(ModelConfig) | options_of(TrainConfig)
for name in ("data", "out", "cache_dir", "init_from", "device"):  # replaced by harmless ones
    del TRAIN[name]
TRAIN |= {
    "preset": use("--preset", str, list(PRESETS)), "resume": lambda draw: ["--resume"],
    "eval_only": lambda draw: ["--eval-only"], "config": use("--config", str, ["missing.json", "."]),
    "device": use("--device", str, ["cpu"] * 9 + ["auto", "cuda", "mps"]), "data": use("--data", str, ["missing", "."]),
    "out": use("--out", str, ["run", "run/inner", "cache"]), "init_from": use("--init-from", str, ["missing", "."]),
    "cache_dir": use("--cache-dir", str, ["cache"]), "import": use("--import", str, ["missing.py", "."]),
    "unknown": use("--unknown", str, ["x"]), "ranks": use("--ranks", int, ["1", "2"]),
    "abbreviated": use("--batch", int, ["2"]), "positional": lambda draw: [draw.choice(ODD[str])],
}  # fmt: skip
PLAN = {"card": use("--card", str, ["h100", "a100"]), "plan": lambda draw: ["--plan", "--device", "cuda"]}


def test_flags_of_train(place, text, ends, cases, record):
    draw, tried, accepted = random.Random(0), Tried(place, ends), []
    common = f"--tokenizer bytes --device cpu --no-fast --dtype float32 --cache-dir {place}/cache --data {text}".split()
    common += ["--dim", "8", "--layers", "1", "--context", "16", "--eval-tokens", "32", "--steps", "2"]
    for _ in range(cases(60, 1200)):
        given = [*common, *arguments(TRAIN, draw)]
        if tried.run(validator, given) == 0 and is_small(given):
            accepted.append(given)
    for given in draw.sample(accepted, min(len(accepted), cases(1, 60))):
        run = place / "accepted"
        code = tried.run(train.main, [*given, "--steps", "2", "--out", str(run)])
        assert code or json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2, given
        shutil.rmtree(run, ignore_errors=True)
    record(codes=tried.codes, slowest_seconds=tried.slowest)


def test_flags_of_plan(place, ends, cases, record):
    draw, tried = random.Random(0), Tried(place, ends)
    sizes = ["--dim", "8", "--layers", "1", "--context", "16", "--plan"]
    for _ in range(cases(3, 100)):
        tried.run(validator, [*sizes, *arguments(TRAIN | PLAN, draw)])
    record(codes=tried.codes, slowest_seconds=tried.slowest)


GENERATE = options_of(Sampling) | {
    "samples": use("--samples", int, ["1", "3"]), "stop": use("--stop", str, ["e", "the"]),
    "prompt": use("--prompt", str, ["the ", "日本"]), "device": use("--device", str, ["cpu"]),
    "dtype": use("--dtype", str, ["float32", "auto", "float16"]), "fast": use("--fast", bool, []),
    "import": use("--import", str, ["missing.py"]), "unknown": use("--unknown", str, ["x"]),
    "checkpoint": use("--checkpoint", str, ["missing"]),
}  # fmt: skip


def test_flags_of_generate(place, text, ends, cases, record):
    """Those that are accepted generate."""
    draw, tried = random.Random(0), Tried(place, ends)
    sizes = "--dim 8 --layers 1 --context 16 --steps 1 --eval-tokens 32 --tokenizer bytes --device cpu --dtype float32"
    places = ["--data", str(text), "--cache-dir", str(place / "cache"), "--out", "model"]
    train.main([*sizes.split(), "--no-fast", *places])
    for known in (["--prompt=--"], ["--samples=2147483647"], ["--import", "x" * 5000]):
        assert tried.run(generate.main, ["--checkpoint", "model", *known]) == 2, known
    for _ in range(cases(30, 500)):
        tried.run(generate.main, ["--checkpoint", "model", "--device", "cpu", *arguments(GENERATE, draw)])
    record(codes=tried.codes, slowest_seconds=tried.slowest)


ABLATE = TRAIN | {
    "norms": use("--norms", str, [*KINDS, "rmsnorm:eps=1e-5", "rmsnorm:eps=x", "layernorm:bias=false,eps=1"]),
    "placements": use("--placements", str, list(PLACEMENTS)), "seeds": use("--seeds", int, ["1", "3"]),
    "factor": use("--factor", str, ["optimizer=muon,adamw", "layers=1,2", "lr=1,2", "layers=", "layers=1,1", "x=1"]),
    "lrs": use("--lrs", float, PLAUSIBLE[float]), "widen": use("--widen", int, ["0", "1"]),
    "equivalence": use("--equivalence", float, ["0.1"]), "jobs": use("--jobs", int, ["1", "2"]),
    "threads": use("--threads", int, ["1", "2"]), "probe": lambda draw: ["--probe"],
}  # fmt: skip


def test_flags_of_ablate(place, text, ends, cases, record):
    draw, tried = random.Random(0), Tried(place, ends)
    common = f"--tokenizer bytes --device cpu --no-fast --dtype float32 --cache-dir {place}/cache --data {text}".split()
    for known in (["--context=--"], ["--threads=2147483647"], ["--jobs=2147483647"]):
        assert tried.run(ablation_validator, [*common, *known]) == 2, known
    for _ in range(cases(15, 200)):
        tried.run(ablation_validator, [*common, "--dim", "8", "--context", "16", *arguments(ABLATE, draw)])
    record(codes=tried.codes, slowest_seconds=tried.slowest)


def test_flags_of_bench(place, ends, cases, record):
    """A few of those that are accepted measure."""
    draw, tried, accepted = random.Random(0), Tried(place, ends), []
    commands = {name: options_of(config) for name, (_, config) in bench.COMMANDS.items()}
    for _ in range(cases(15, 300)):
        name = draw.choice([*sorted(commands), "", "x", "--rounds"])
        given = [name, *arguments(commands.get(name, commands["norms"]), draw)]
        if tried.run(bench_validator, given) == 0:
            accepted.append(given)
    small = ["--rows", "2", "--dim", "8", "--rounds", "1", "--out", "report.json", "--device", "cpu", "--no-compile"]
    norms = [given for given in accepted if given[0] == "norms"]
    for given in norms[: cases(0, 5)]:
        tried.run(bench.main, [*given, *small])
    record(codes=tried.codes, slowest_seconds=tried.slowest)
