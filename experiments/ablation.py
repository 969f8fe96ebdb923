"""The command `ablate.py`: which runs an ablation needs, starting them, and the report."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from config import Asked, check_sizes, fields_of, option
from data.prepare import Prepared, prepare
from experiments.arms import Configs, ladder, resolve_arms, resolve_factors
from experiments.costs import EQUAL, costs, equal_steps, step_times
from experiments.grid import Cell, Grid, resolve_devices
from experiments.rates import Optimum
from experiments.records import SEARCH, Arm, compared
from experiments.report import write_report
from files import digest, read_json, require, said, write_atomically
from norms.placement import PLACEMENTS
from runtime.run_dir import RUNS_FOLDER, check_not_in_use, read_run_file

TOKENS_PER_PARAMETER = 4.4
COSTS = "costs.json"  # what was measured before the runs, and the steps that follow


@dataclass(frozen=True)
class AblationConfig:
    """Options of `ablate.py`, besides those of train.py."""

    norms: list[str] = option(
        [],
        "norms to compare; the first is the baseline (default: the model's)",
        metavar="KIND[:KEY=VALUE,...]",
    )
    placements: list[str] = option(
        [],
        f"placements to compare, of {', '.join(PLACEMENTS)}; the first is the baseline (default: the model's)",
        metavar="NAME[:KEY=VALUE,...]",
    )
    factor: list[str] = option(
        [],
        "values of another option to compare, such as optimizer=muon,adamw; the first is the baseline; may be repeated",
        metavar="NAME=V1,V2",
    )
    seeds: int = option(3, "number of seeds per arm, from --seed on")
    lrs: list[float] = option(
        [],
        "learning rates from which the search for each arm's best one starts, in addition to --lr, on another seed",
        type=float,
        metavar="LR",
    )
    equal: str = option(
        "tokens",
        "what all arms have as much of as the first one: with flops and time, others have more or fewer --steps",
        choices=EQUAL,
    )
    jobs: int = option(None, "runs at a time per device; --device cuda:0,1 names two (default: by cores, 1 on a GPU)")
    threads: int = option(1, "CPU threads per run")
    print_commands: bool = option(
        False, "run nothing; print a line of shell for each run that has not ended, and report on those that have"
    )
    ladder: list[int] = option(
        [],
        "widths (--dim) at which all arms are compared, multiples of --head-dim; --heads and --steps grow with them",
        type=int,
        metavar="DIM",
    )
    tokens_per_parameter: float = option(
        None, f"tokens per parameter of the first arm, with --ladder (default: {TOKENS_PER_PARAMETER})"
    )


def resolve_ablation(options: AblationConfig, asked: Asked) -> Grid:
    """The runs of an ablation, from its options and what all ask of train.py. Raises ValueError for invalid ones."""
    check_sizes(options, "seeds", "jobs", "threads", most=SEARCH)
    require(all(0 < lr < math.inf for lr in options.lrs), "--lrs must be positive numbers")
    for name, example in (("norm", "dyt:alpha=1"), ("placement", "mhc:streams=2")):
        require(f"{name}_args" not in asked, f"--{name}-arg is for a single run; write --{name}s {example}")
    shared = {name: value for name, value in asked.items() if name not in ("out", "device")}
    arms = resolve_factors(options.norms, options.placements, options.factor, shared)
    require(
        options.equal == "tokens" or "steps" not in dict(arms[0].factors), "--equal sets --steps; leave out its factor"
    )
    tokens = options.tokens_per_parameter
    require(options.ladder or tokens is None, "--tokens-per-parameter is for a --ladder")
    if options.ladder:
        arms = ladder(options.ladder, arms, shared, TOKENS_PER_PARAMETER if tokens is None else tokens)
    devices = resolve_devices(asked["device"]) if "device" in asked else ("",)
    on_device = shared | ({"device": devices[0]} if devices[0] else {})  # each run gets one
    configs = resolve_arms(arms, on_device)
    dtype = asked.get("dtype", "auto")
    as_asked = {arm: (model, replace(config, dtype=dtype)) for arm, (model, config) in configs.items()}
    folder = Path(asked.get("out") or RUNS_FOLDER / f"ablation-{digest_of(as_asked, options.equal)}")
    check_not_in_use(folder)
    ours = (folder / "cells").is_dir() or not (folder.is_file() or any(folder.glob("*")))
    require(ours, f"--out {folder} is a file, or not empty; choose another folder")
    started = [read_run_file(file) for file in list(folder.glob("cells/*/run.json"))[:1]]
    if started and dtype == "auto":  # it was decided on another machine
        on_device["dtype"] = started[0]["resolved"]["dtype"]
        configs = resolve_arms(arms, on_device)
    config = next(iter(configs.values()))[1]
    on_device["dtype"] = config.dtype
    data = prepare_text(configs)
    measured = measure(configs, options, folder)
    steps: Mapping[Arm, Asked] = {arm: measured["asked"].get(arm.name, {}) for arm in configs}
    configs = resolve_arms(arms, on_device, steps)
    most = max(1, torch.get_num_threads() // options.threads) if config.device == "cpu" else 1
    times = measured["step_time"]
    grid = Grid(
        folder=folder,
        configs=configs,
        shared=shared,
        steps=steps,
        costs={arm: costs(*each) | {"step_time": times.get(arm.name)} for arm, each in configs.items()},
        data=data,
        seeds=range(config.seed, config.seed + options.seeds),
        jobs=options.jobs or most,
        threads=options.threads,
        devices=devices,
        lrs=sorted({*options.lrs, config.lr}),
        print_commands=options.print_commands,
    )
    seeds = [*grid.seeds, config.seed + SEARCH] if len(grid.lrs) > 1 else [*grid.seeds]
    for cell in (Cell(arm, lr, seed) for arm in configs for lr in grid.lrs for seed in seeds):
        grid.record(cell)  # refuses runs with other settings before anything is written
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    write_atomically(folder / COSTS, json.dumps(measured, indent=2) + "\n")
    return grid


def measure(configs: Configs, options: AblationConfig, folder: Path) -> dict[str, Any]:
    """What `COSTS` holds: the relative time of a step of each arm, by name, and the steps that follow from --equal.

    What the folder has stays, also if arms are added. Without --equal time, the measurement is brief, and there is none
    on a GPU or of compiled steps. Raises ValueError if the steps follow from another command.
    """
    baseline, (_, config) = next(iter(configs.items()))
    here: dict[str, Any] = {"equal": options.equal, "baseline": baseline.name, "steps": config.steps}
    times: dict[str, float] = {}
    if (folder / COSTS).exists():
        there = read_json(folder / COSTS, dict)
        for name, value in here.items():
            same = there.get(name) == value or there.get("equal") == options.equal == "tokens"
            require(same, f"{folder} was made with {name} {there.get(name)}, not {value}; choose another --out")
        times = there["step_time"] if there | here == there else {}
    plain = config.device == "cpu" and not any(config.compile for _, config in configs.values())
    wanted = options.equal == "time" or (plain and not options.print_commands)
    if wanted and any(arm.name not in times for arm in configs):
        found = step_times(configs, options.threads, briefly=options.equal != "time")
        times = {arm.name: round(middle, 4) for arm, (middle, *_) in found.items()} | times
    asked = {arm.name: asked for arm, asked in equal_steps(configs, options.equal, times).items()}
    return here | {"step_time": times, "asked": asked}


def prepare_text(configs: Configs) -> Prepared:
    """The text that all arms share."""
    model, config = next(iter(configs.values()))
    context = max(model.context for model, _ in configs.values())
    cache, val_names, column = Path(config.cache_dir), config.val_data, config.text_column
    return prepare(config.data, config.tokenizer, model.vocab_size, cache, context, val_names=val_names, column=column)


def digest_of(configs: Configs, equal: str) -> str:
    """Short hash of the compared settings. More seeds or learning rates do not change it."""
    arms: list[Any] = [(arm.factors, compared(fields_of(*each))) for arm, each in configs.items()]
    return digest(arms if equal == "tokens" else [*arms, equal])[:8]


def run_ablation(grid: Grid, command: str) -> list[str]:
    """Run what has not ended, and write the report, also when interrupted. Returns its summary."""
    write_atomically(grid.folder / "command.txt", command + "\n")
    optima = dict.fromkeys(grid.configs, Optimum(grid.lrs[0], 0.0))
    summary = [""]
    try:
        if len(grid.lrs) > 1:
            optima = {}
            optima = grid.tune()
        grid.run(grid.reported(optima))
    finally:
        cells = dict.fromkeys([*grid.reported(optima), *grid.asked])
        records = [grid.record(cell) for cell in cells]
        if any(record.ended for record in records):
            notes = [f"{line}." for line in dict.fromkeys(said) if line.startswith("skipped: ")]
            summary = write_report(grid.folder, records, command, notes)
    return summary
