"""The command `ablate.py`: which runs an ablation needs, starting them, and the report."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from config import REMOVED, Asked, carry_lr, check_values, combine, fields_of, option, preset_lr
from data.prepare import prepare
from experiments.arms import asked_of, ladder, resolve_arms, resolve_factors
from experiments.costs import EQUAL, Configs, costs, equal_steps, step_times
from experiments.grid import WIDEN, Cell, Grid, resolve_devices
from experiments.records import SEARCH, Arm, compared, grouped, spelled
from experiments.report import make_report
from files import digest, read_json, require, warn, write_atomically
from norms.placement import PLACEMENTS
from runtime.run_dir import RUNS_FOLDER, read_run_file

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
    seeds: int = option(3, "number of seeds per arm, from --seed on", bounds={"at least": 1, "at most": SEARCH})
    lrs: list[float] = option(
        [],
        "first learning rates of the search for each arm's best one, besides --lr; it comes to 1.2 to 3 times as many; "
        "they are those of the first arm's sizes, and are carried to others",
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
    check_values(options)
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
    on_device = shared | {"device": devices[0]}  # each run gets one
    configs = resolve_arms(arms, on_device)
    settings = [(arm.factors, compared(fields_of(*each)) | REMOVED) for arm, each in configs.items()]
    for _, each in settings:  # as at 5a132b0, so that its folders keep their names
        each |= {name: each.pop(name) for name in ("shard", "eval_every", "eval_tokens")} | {"lr": preset_lr(each)}
    name = f"ablation-{digest([options.equal, *settings])[:8]}"  # the same with more seeds or learning rates
    folder = Path(asked.get("out") or RUNS_FOLDER / name)
    free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(free or (folder / "cells").is_dir(), f"--out {folder} is a file, or not empty; choose another folder")
    for file in folder.glob("cells/*/run.json"):
        read_run_file(file)  # raises ValueError for one of another version
    model, config = next(iter(configs.values()))  # all arms share the text
    cache, size = Path(config.cache_dir), model.vocab_size
    longest = max(model.context for model, _ in configs.values())
    data = prepare(config.data, config.tokenizer, size, cache, longest, None, config.val_data, config.text_column)
    lrs = first_rates(configs, options.lrs, folder)
    measured = measure(configs, options, folder)
    steps = measured["asked"]
    configs = resolve_arms(arms, on_device, steps)
    most = max(1, torch.get_num_threads() // options.threads) if config.device == "cpu" else 1
    grid = Grid(
        folder=folder,
        configs=configs,
        asked={arm: combine(shared, asked_of(arm), steps.get(arm.name, {})) for arm in configs},
        costs={arm: costs(*each) | {"step_time": measured["step_time"].get(arm.name)} for arm, each in configs.items()},
        data=data,
        seeds=range(config.seed, config.seed + options.seeds),
        jobs=options.jobs or most,
        threads=options.threads,
        devices=devices,
        lrs=lrs,
        print_commands=options.print_commands,
    )
    for arm in configs:
        for lr, seed in product(lrs[arm], [*grid.seeds, config.seed + SEARCH]):
            grid.record(Cell(arm, lr, seed))  # refuses runs with other settings before anything is written
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    if options.equal != "tokens":
        write_atomically(folder / COSTS, json.dumps(measured, indent=2) + "\n")
    return grid


def first_rates(configs: Configs, lrs: Sequence[float], folder: Path) -> dict[Arm, list[float]]:
    """The learning rates with which each arm begins: its own, and `lrs`, which are those of the first arm's sizes.

    At 5a132b0, all arms had the rate of the preset. An arm whose runs were begun at that goes on there.
    """
    found = {}
    first = fields_of(*next(iter(configs.values())))
    for arm, (model, config) in configs.items():
        here = fields_of(model, config)
        preset = preset_lr(here)
        old = folder / "cells" / Cell(arm, preset, config.seed).name
        own = preset if old.exists() else config.lr
        found[arm] = sorted({own, *(carry_lr(lr, first, here) for lr in lrs)})
    return found


def measure(configs: Configs, options: AblationConfig, folder: Path) -> Asked:
    """What `COSTS` holds: the relative time of a step of each arm, by name, and the steps that follow from --equal.

    Steps are timed with --equal time. What the folder has stays, also if arms are added. Raises ValueError if the steps
    follow from another command.
    """
    baseline, (_, config) = next(iter(configs.items()))
    here: Asked = {"equal": options.equal, "baseline": baseline.name, "steps": config.steps}
    there = read_json(folder / COSTS, dict) if (folder / COSTS).exists() else here
    for name, value in here.items():
        made = there.get(name)
        require(made == value, f"{folder} was made with {name} {made}, not {value}; choose another --out")
    times: dict[str, float] = there.get("step_time", {})
    if options.equal == "time" and any(arm.name not in times for arm in configs):
        found = step_times(configs, options.threads)
        times = {arm.name: round(middle, 4) for arm, (middle, *_) in found.items()} | times
    asked = {arm.name: asked for arm, asked in equal_steps(configs, options.equal, times).items()}
    return here | {"step_time": times, "asked": asked}


def run_ablation(grid: Grid, command: str) -> list[str]:
    """Run what has not ended, and write the report, also when interrupted. Returns its summary."""
    for rates, names in grouped((tuple(rates), arm.name) for arm, rates in grid.lrs.items()).items():
        warn(f"lr {' '.join(map(spelled, rates))}: {', '.join(names)}")
    arms = len(grid.configs)
    number = max(map(len, grid.lrs.values()))
    if number > 1:
        most = arms * ((number + 1 + WIDEN) ** 2 // 4)  # an arm has the most runs with as many rates as seeds
        warn(f"search: {arms * number} runs at first, in all usually 1.2 to 3 times as many, and at most {most}")
    write_atomically(grid.folder / "command.txt", f"{command}\n")
    optima = {}
    summary = [""]
    try:
        optima = grid.tune()
        grid.run(grid.reported(optima))
        others = {file.parent.name for file in grid.folder.glob("cells/*/run.json")}
        if others := others - {cell.name for cell in grid.planned}:
            warn(f"runs in {grid.folder}/cells left out, because they are no longer asked for: {len(others)}")
    finally:
        records = [grid.record(cell) for cell in dict.fromkeys([*grid.reported(optima), *grid.planned])]
        if any(record.ended for record in records):
            summary = make_report(grid.folder, records, command)
    return summary
