"""The command: which runs an ablation needs, and what it writes about them."""

import csv
import io
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from config import FIELDS, Asked, ModelConfig, TrainConfig, check_sizes, fields_of, flag_name, option
from experiments.ablation.grid import (
    MAX_SEEDS,
    NOT_COMPARED,
    SKIPPED,
    Cell,
    Grid,
    Settings,
    prepare_text,
    resolve_arms,
    resolve_devices,
    settings_digest,
)
from experiments.ablation.outcome import SIZE, Arm, Outcome, grouped
from experiments.ablation.plots import SIDES, arm_styles, plot_curves, plot_differences, plot_ladder
from experiments.ablation.rates import Optimum
from experiments.ablation.report import HOW_TO_READ, PARTIAL, Comparison, comparison_section, missing, sweep_section
from experiments.benchmarks import flops_per_token
from files import require, said, warn, write_atomically
from model import Llama
from norms import KINDS
from norms.placement import PLACEMENTS
from pages.html import figure, folded, markdown, page, save_plot, settings_list
from pages.watch import plot_maps, plot_streams
from runtime.run_dir import RUNS_FOLDER, check_not_in_use, machine_of, read_rows, read_run_file

OWN_FLAG = {"norm": "--norms", "placement": "--placements", "lr": "--lrs", "seed": "--seeds"}
OWN_FLAG |= {"norm_args": "--norms", "placement_args": "--placements"}
SHARED = NOT_COMPARED | {"data", "val_data", "text_column", "tokenizer", "vocab_size", "eval_tokens", "device", "shard"}
TOKENS_PER_PARAMETER = 4.4


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


def resolve_ablation(options: AblationConfig, asked: dict[str, Any]) -> Grid:
    """The runs of an ablation, from its options and what all ask of train.py. Raises ValueError for invalid ones."""
    check_sizes(options, "seeds", "jobs", "threads", most=MAX_SEEDS)
    require(all(0 < lr < math.inf for lr in options.lrs), "--lrs must be positive numbers")
    for name, example in (("norm", "dyt:alpha=1"), ("placement", "mhc:streams=2")):
        require(f"{name}_args" not in asked, f"--{name}-arg is for a single run; write --{name}s {example}")
    shared = {name: value for name, value in asked.items() if name not in ("out", "device")}
    arms = resolve_factors(options, shared)
    tokens = options.tokens_per_parameter
    require(options.ladder or tokens is None, "--tokens-per-parameter is for a --ladder")
    if options.ladder:
        arms = climb(options.ladder, arms, shared, TOKENS_PER_PARAMETER if tokens is None else tokens)
    devices = resolve_devices(asked["device"]) if "device" in asked else ("",)
    on_device = shared | ({"device": devices[0]} if devices[0] else {})  # each run gets one
    settings = resolve_arms(arms, on_device)
    dtype = asked.get("dtype", "auto")
    as_asked = {arm: (model, replace(config, dtype=dtype)) for arm, (model, config) in settings.items()}
    folder = Path(asked.get("out") or RUNS_FOLDER / f"ablation-{settings_digest(as_asked)}")
    check_not_in_use(folder)
    started = [read_run_file(file) for file in list(folder.glob("cells/*/run.json"))[:1]]
    if started and dtype == "auto":  # it was measured, and might come out differently now
        settings = resolve_arms(arms, on_device | {"dtype": started[0]["resolved"]["dtype"]})
    config = next(iter(settings.values()))[1]
    most = max(1, torch.get_num_threads() // options.threads) if config.device == "cpu" else 1
    grid = Grid(
        folder=folder,
        settings=settings,
        shared=shared,
        data=prepare_text(settings),
        seeds=range(config.seed, config.seed + options.seeds),
        jobs=options.jobs or most,
        threads=options.threads,
        devices=devices,
        lrs=sorted({*options.lrs, config.lr}),
        print_commands=options.print_commands,
    )
    ours = (folder / "cells").is_dir() or not (folder.is_file() or any(folder.glob("*")))
    require(ours, f"--out {folder} is a file, or not empty; choose another folder")
    seeds = [*grid.seeds, config.seed + MAX_SEEDS] if len(grid.lrs) > 1 else [*grid.seeds]
    planned = [Cell(arm, lr, seed) for arm in settings for lr in grid.lrs for seed in seeds]
    grid.outcomes(planned)  # refuses runs with other settings before anything is written
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    return grid


def resolve_factors(options: AblationConfig, shared: Asked) -> list[Arm]:
    """The arms, without checking whether the model supports each. Raises ValueError for invalid options.

    An arm has a norm or a placement only if --norms or --placements says so: else it is that of its recipe.
    """
    factors: dict[str, list[str]] = {}
    choices: tuple = (("norm", options.norms, KINDS), ("placement", options.placements, PLACEMENTS))
    for name, levels, known in choices:
        for kind in (text.partition(":")[0] for text in levels):
            require(kind in known, f"--{name}s: unknown {kind!r}; choose from {', '.join(known)}, separated by spaces")
        factors |= {name: levels} if levels else {}
    for text in options.factor:
        dashed, _, values = text.partition("=")
        name = dashed.replace("-", "_")
        require(
            name == "recipe" or (name in FIELDS and FIELDS[name].metadata["help"]),
            f"--factor {text}: {dashed!r} is not an option that can vary; choose another of train.py, like optimizer",
        )
        require(name not in OWN_FLAG, f"--factor {text}: use {OWN_FLAG.get(name)}")
        require(name not in SHARED, f"--factor {text}: all runs of an ablation share --{dashed}")
        require(name not in factors, f"--factor {text}: {dashed} is given twice; list all values in one")
        factors[name] = values.split(",")
    for name in dict.fromkeys(["norm", "placement", *factors]):
        flag = OWN_FLAG.get(name, f"--factor {name}")
        levels = factors.get(name, [])
        require(all(levels) and len(set(levels)) == len(levels), f"{flag} needs distinct values, not {levels}")
        require(name not in shared, f"{flag_name(name)} is for a single run; list all values with {flag}")
    return [Arm.of(**dict(zip(factors, levels, strict=True))) for levels in product(*factors.values())]


def climb(widths: Sequence[int], arms: Sequence[Arm], shared: Asked, tokens_per_parameter: float) -> list[Arm]:
    """Each of `arms` at each width. Prints what a size is. Raises ValueError for widths that heads do not divide.

    Heads have the same width at every size, and steps give the same number of tokens per parameter of the first arm.
    """
    distinct = len(set(widths)) == len(widths) > 1
    require(distinct and min(widths) > 0, f"--ladder needs two or more distinct positive widths, not {widths}")
    require(0 < tokens_per_parameter < math.inf, f"--tokens-per-parameter must be positive, not {tokens_per_parameter}")
    for name in ("dim", "heads", "hidden_dim", "steps"):
        given = name in shared or name in dict(arms[0].factors)
        require(not given, f"{flag_name(name)} follows from --ladder; leave it out")
    ((model, _),) = resolve_arms(arms[:1], shared).values()
    head_dim, climbed = model.head_dim, []
    for width in sorted(widths):
        advice = f"must be a multiple of the size of a head, {head_dim}; --head-dim sets it"
        require(width % head_dim == 0, f"--ladder {width} {advice}")
        heads = width // head_dim
        ((model, config),) = resolve_arms(arms[:1], shared | {"dim": width, "heads": heads}).values()
        default = ModelConfig(dim=width, heads=heads, mlp=model.mlp).hidden_dim
        fixed = f"--ladder derives --hidden-dim from the width, and --config or --preset fixes it at {model.hidden_dim}"
        require(model.hidden_dim == default, f"{fixed}; use others")
        parameters = costs(model, config)["parameters"]
        steps = max(1, round(tokens_per_parameter * parameters / (config.batch_size * model.context)))
        value = f"dim={width},heads={heads},steps={steps}"
        print(f"{value}: {parameters:,} parameters, {tokens_per_parameter:g} tokens for each", file=sys.stderr)
        climbed += [Arm(((SIZE, value), *arm.factors)) for arm in arms]
    return climbed


def run_ablation(grid: Grid, command: str) -> None:
    """Run what has not ended, and write the report, also when interrupted."""
    write_atomically(grid.folder / "command.txt", command + "\n")
    optima = dict.fromkeys(grid.settings, Optimum(grid.lrs[0], 0.0))
    try:
        if len(grid.lrs) > 1:
            optima = {}
            optima, _ = grid.tune(dict.fromkeys(grid.settings, grid.lrs))
        grid.run(grid.reported(optima))
    finally:
        write_report(grid, optima, command)


def write_report(grid: Grid, optima: Mapping[Arm, Optimum], command: str) -> None:
    """Write the files about the runs that have ended. `optima` is empty before all learning rates are known."""
    reported = grid.reported(optima)
    sweep = [cell for cell in dict.fromkeys(grid.asked) if cell.seed not in grid.seeds]
    outcomes = grid.outcomes([*reported, *sweep])
    if not outcomes:
        return
    flops = {arm: costs(*each)["flops"] for arm, each in grid.settings.items() if arm.size}
    comparison = Comparison({}, {}, {}, {}, [""])
    if reported:
        comparison = comparison_section(reported, outcomes, optima, flops)
    searching = f"{PARTIAL}the search for learning rates has not ended; {len(outcomes)} of its runs have.**"
    partial = missing([*reported, *sweep], outcomes) if reported else searching
    comparison.text[0] = f"{partial} {comparison.text[0]}".strip()
    if sweep:
        comparison.text.extend(sweep_section(sweep, outcomes, optima))
    title = f"seeds {grid.seeds[0]} to {grid.seeds[-1]}" if len(grid.seeds) > 1 else f"seed {grid.seeds[0]}"
    files = [file for cell in outcomes if (file := grid.cell_folder(cell) / "run.json").exists()]
    machines = sorted({machine_of(read_run_file(file)) for file in files})
    about = [f"`{command}`", f"{title}; {'; '.join(machines)}."]
    about += [f"{line}." for line in dict.fromkeys(said) if line.startswith(SKIPPED)]
    figures, found, styles = {}, comparison.found, arm_styles(grid.settings)
    if any(finding.values for finding in found.values()):
        against = f"Difference from {'the first arm of a size' if flops else reported[0].arm.name}, {title}"
        named, label = {arm.name: each for arm, each in found.items()}, f"val_bpb, paired by seed\n{SIDES}"
        if comparison.trends:
            figures["ladder"] = plot_ladder(found, flops, against)
        figures["differences"] = plot_differences(named, label, against, styles)
    if runs := [outcomes[cell] for arm in comparison.rows for cell in reported if cell.arm == arm and cell in outcomes]:
        figures["curves"] = plot_curves(
            runs, styles, f"Means of {title}" + (" that have ended" if partial else ""), ["step"]
        )
    logs = {cell: read_rows(grid.cell_folder(cell) / "watch.jsonl") for cell in reported if cell in outcomes}
    if (bare := sum(not log for log in logs.values())) and reported and grid.settings[reported[0].arm][1].watch:
        warn(f"{bare} of {len(logs)} runs had ended without --watch; another --out trains them with it")
    if watched := {cell.arm.name: log for cell, log in logs.items() if log}:  # each arm's last seed
        figures["watch"] = plot_streams(watched, styles)
    named_runs = {cell.name: run for cell, run in outcomes.items()}
    search = {cell.name for cell in sweep}
    more = [folded(f"Heat maps of {name}", figure(plot_maps(log), name, "colors")) for name, log in watched.items()]
    more.append(folded("Settings of the first arm", settings_list(fields_of(*next(iter(grid.settings.values()))))))
    factors = ((name, arm.width if name == SIZE else value) for arm in grid.settings for name, value in arm.factors)
    levels = grouped(dict.fromkeys(factors))
    compared = "; ".join(f"{name.replace('_', ' ')}: {', '.join(values)}" for name, values in levels.items())
    write_files(grid.folder, compared, comparison, named_runs, grid.settings, about, figures, "\n".join(more), search)


def costs(model_config: ModelConfig, config: TrainConfig) -> dict[str, Any]:
    """Parameters, training tokens, and FLOPs of a run."""
    with torch.device("meta"):
        model = Llama(model_config)
    tokens = config.steps * config.batch_size * model_config.context
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"parameters": parameters, "tokens": tokens, "flops": tokens * flops_per_token(model)}


def write_files(
    folder: Path,
    title: str,
    comparison: Comparison,
    runs: Mapping[str, Outcome],
    settings: Settings,
    about: list[str],
    figures: Mapping[str, Figure],
    more: str = "",
    search: Collection[str] = (),
) -> None:
    """Write `runs.csv`, `arms.csv`, `report.json`, `table.md`, the figures, and `report.html` with `more` at its end.

    `settings` may lack arms. Their size is not known. Runs in `search` are only for the choice of a rate. Figures that
    only an earlier report had are deleted.
    """
    earlier = (folder / "report.json").exists()
    for arm in comparison.rows.keys() & settings.keys():
        comparison.rows[arm].update(costs(*settings[arm]))
    arms = list(comparison.rows.values())
    rows_of_runs = [run.row | {"run": name, "search": name in search} for name, run in runs.items()]
    for name, rows in (("runs", rows_of_runs), ("arms", arms)):
        file = io.StringIO()
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(folder / f"{name}.csv", file.getvalue())
    summary, *tables = comparison.text
    pairs = [{"arm": arm.name, "baseline": other.name, **each.row} for (arm, other), each in comparison.pairs.items()]
    slopes = [{"arm": arm.name, **each.row} for arm, each in comparison.trends.items()]
    report = {"summary": summary, "arms": arms, "comparisons": pairs, "slopes": slopes}
    write_atomically(folder / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    about = [*about, *HOW_TO_READ]
    write_atomically(folder / "table.md", "\n\n".join(filter(None, [summary, *about, *tables])) + "\n")
    sections, kinds = [markdown(summary)], ("png", "svg", "pdf")
    for name, kind in product({"differences", "ladder", "curves", "watch"} - figures.keys(), kinds):
        if earlier:
            (folder / f"{name}.{kind}").unlink(missing_ok=True)
    for name, plot in figures.items():
        for kind in kinds:
            save_plot(plot, folder / f"{name}.{kind}")
        sections.append(figure(plot, alt=f"{name} of the arms"))
    sections += [markdown("\n\n".join(tables)), folded("How to read this", markdown("\n\n".join(about))), more]
    write_atomically(folder / "report.html", page(title, sections))
