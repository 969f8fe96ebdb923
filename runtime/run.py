"""The run that flags describe: a new one, or one to continue or evaluate."""

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config import ModelConfig, TrainConfig, configs_from, read_run, require
from data.batches import Prepared, prepare
from data.tokenizer import Tokenizer
from files import InUse, is_a, load_json
from norms import TRAITS
from runtime import distributed
from runtime.acceleration import resolve_fast, unavailable
from runtime.checkpoint import TRAINING_STATE, check_space, find_checkpoint, intact_checkpoint, latest_checkpoint
from runtime.device import compile_by_default, pick_device, pick_dtype
from runtime.huggingface.directory import check_context, open_model, read_tokenizer
from runtime.plugins import warn_of_imports
from runtime.report import shown
from runtime.run_dir import (
    RUNS,
    check_not_in_use,
    check_run_dir,
    check_tracker,
    make_run_dir,
    newest_run,
    read_rows,
    read_run_file,
)

FIXED_ON_RESUME = ("data", "tokenizer", "seed", "batch_size", "optimizer")


@dataclass
class Run:
    """A resolved run: where it is stored, what is trained, how, and on what."""

    folder: Path
    model_config: ModelConfig
    config: TrainConfig
    device: torch.device
    dtype: torch.dtype
    data: Prepared


def resolve_run(flags: argparse.Namespace) -> Run:
    """Turn flags into a run. Raises ValueError for incompatible options. All ranks get the same run or error."""
    restarted = distributed.restarted()
    with distributed.raise_on_all_ranks(InUse):
        out, model_config, config, device, data = resolve_settings(flags, restarted)
    name = f"{data.corpus_name}-{model_config.norm}-{model_config.placement}"
    folder = distributed.from_main(make_run_dir, out, name)
    return Run(folder, model_config, config, device, pick_dtype(config.dtype, device), data)


def resolve_settings(
    flags: argparse.Namespace, restarted: bool = False
) -> tuple[Path | None, ModelConfig, TrainConfig, torch.device, Prepared]:
    """Everything of a run but its folder: --out or None. The cheap checks come first.

    A restart by torchrun continues the run in --out if the same launch has started it, or starts a run.
    """
    out = Path(flags.out) if getattr(flags, "out", "") else None
    if distributed.may_restart() and out is None:
        raise ValueError("torchrun --max-restarts needs --out: a restart finds its run there")
    if restarted and out and started_by_this_launch(out / "run.json"):
        flags.resume, flags.preset = not flags.eval_only, None
    existing = flags.resume or flags.eval_only
    if existing:
        if flags.preset:
            raise ValueError("--preset is for new runs; --resume and --eval-only take the configuration of the run")
        out = out or (Path(flags.config).parent if flags.config else newest_run())
        flags.config = out / "run.json"
    if flags.eval_only and unavailable():
        flags.fast = False  # evaluate a run that used the kernels where there are none
    if out:
        if distributed.is_main() and not flags.eval_only:
            check_not_in_use(out)
        check_run_dir(out, existing, writes=not flags.eval_only)
    if existing:
        read_run_file(flags.config)  # a damaged file is not one with other settings
    model_config, config = resolve(flags)
    if existing:
        check_same_settings(flags.config, model_config, config, FIXED_ON_RESUME)
        if flags.resume and "fast" not in read_run(flags.config):
            raise ValueError(f"the run in {out} is of an earlier version, which trained differently; start a new one")
        check_history(flags.config)
        check_checkpoints(flags.config.parent)
        if flags.resume and (changes := changed_options(flags.config, config)) and distributed.is_main():
            print(f"changed: {', '.join(changes)}", file=sys.stderr)
    if not flags.eval_only:
        check_space(out or RUNS, model_config, config)
    device = pick_device(config.device)
    tokenizer = None
    if config.init_from:
        # A run that has started no longer needs DIR.
        saved = intact_checkpoint(out, TRAINING_STATE) if out and existing else None
        tokenizer = read_tokenizer(saved or find_checkpoint(config.init_from))
    data = prepare_text(flags, model_config, config, tokenizer)
    if existing:
        check_same_text(flags.config, data)
    return out, model_config, config, device, data


def prepare_text(
    flags: argparse.Namespace, model: ModelConfig, config: TrainConfig, tokenizer: Tokenizer | None = None
) -> Prepared:
    """The text of a run. Only --cache-dir says where to write: from a cache that a file names, text is only read."""
    cache = Path(getattr(flags, "cache_dir", TrainConfig().cache_dir))
    earlier = Path(config.cache_dir)
    return prepare(config.data, config.tokenizer, model.vocab_size, cache, model.context, tokenizer, earlier)


def started_by_this_launch(run_file: Path) -> bool:
    """Whether torchrun, before it restarted the ranks, has started the run or resumed it."""
    return run_file.exists() and read_run_file(run_file).get("launch") == distributed.launch()


def resolve(flags: argparse.Namespace) -> tuple[ModelConfig, TrainConfig]:
    """The configurations, with everything that depends on the machine decided.

    Raises ValueError for incompatible options.
    """
    model_config, config = read_configs(flags, pick_device(getattr(flags, "device", "auto")).type)
    device = pick_device(config.device)
    dtype = str(pick_dtype(config.dtype, device)).removeprefix("torch.")
    step_flops = 6 * model_config.weights * config.batch_size * model_config.context
    compiled = compile_by_default(device, config.steps, step_flops) if config.compile is None else config.compile
    check_tracker(config.log)
    distributed.check_device(device)
    config = dataclasses.replace(config, device=str(device), dtype=dtype, compile=compiled, out="")
    ranks = distributed.world_size()
    check_options(model_config, config, ranks)
    shard = distributed.resolve_shard(config.shard, getattr(flags, "shard", False), dtype, ranks)
    wants_fast = False if shard and not getattr(flags, "fast", False) else config.fast
    fast = resolve_fast(wants_fast, device, dtype, compiled)
    return model_config, dataclasses.replace(config, fast=fast, shard=shard)


def read_configs(flags: argparse.Namespace, device: str) -> tuple[ModelConfig, TrainConfig]:
    """`configs_from`. Raises ValueError that asks for `--import` if the run of --config needs a file."""
    if flags.config:
        read_run(Path(flags.config))
        warn_of_imports(load_json(Path(flags.config)), Path(flags.config))
    return configs_from(flags, device, pretrained_settings(flags))


def pretrained_settings(flags: argparse.Namespace) -> dict[str, Any] | None:
    """The model of --init-from and its kind of tokenizer, for a new run. Raises ValueError if it cannot be read."""
    init_from = getattr(flags, "init_from", "")
    if flags.resume or flags.eval_only:
        return None
    if flags.config and not init_from:
        init_from = read_run(Path(flags.config)).get("init_from", "")
    if not init_from:
        return None
    directory = find_checkpoint(init_from)  # verified before the text is prepared
    model, _ = open_model(directory)
    return dataclasses.asdict(model.config) | {"tokenizer": read_tokenizer(directory).kind}


def check_options(model_config: ModelConfig, config: TrainConfig, ranks: int) -> None:
    """Raise ValueError unless so many ranks can train this model with these options."""
    norm, traits = model_config.norm, TRAITS[model_config.norm]
    if config.compile and config.recompute and not traits.causal_in_training:
        raise ValueError(f"--recompute and --compile do not work together with --norm {norm}")
    if not traits.per_token and config.micro_batch_size * model_config.context < 2:
        raise ValueError(f"--norm {norm} needs at least 2 tokens: --micro-batch-size times --context is 1")
    if not traits.per_token and ranks > 1:
        raise ValueError(f"--norm {norm} trains on one rank: others would have other statistics")
    check_context(model_config, 4 * model_config.weights, "--context is")
    distributed.check_batch(config.batch_size, config.micro_batch_size, ranks)


def check_same_settings(run_file: Path, model_config: ModelConfig, config: TrainConfig, names: Iterable[str]) -> None:
    """Raise ValueError, naming the differences, unless the run in `run_file` has this model and these settings.

    `names` are the fields of TrainConfig to compare. Fields that the run's version lacked count as their defaults.
    """
    given, in_model = read_run(run_file), {field.name for field in dataclasses.fields(ModelConfig)}
    theirs = dataclasses.asdict(TrainConfig()) | given
    theirs |= dataclasses.asdict(ModelConfig(**{name: given[name] for name in given.keys() & in_model}))
    ours = dataclasses.asdict(model_config)
    ours |= {name: getattr(config, name) for name in names}
    differences = [f"{name} {theirs[name]}, not {ours[name]}" for name in ours if theirs[name] != ours[name]]
    if differences:
        raise ValueError(f"the run in {run_file.parent} has {'; '.join(differences)}")


def check_history(run_file: Path) -> None:
    """Raise ValueError if what a resumed run keeps of its run.json is damaged."""
    run = load_json(run_file)
    for name, kind in {"command": list[str], "resumed": list[dict[str, Any]], "weights_from": dict[str, Any]}.items():
        require(name not in run or is_a(run[name], kind), f"{run_file}: {name!r} is damaged")


def check_checkpoints(folder: Path) -> None:
    """Raise ValueError if the run in `folder` has no checkpoint, and its log goes beyond the first that was due."""
    rows, first = read_rows(folder / "metrics.jsonl"), read_run(folder / "run.json").get("save_every", 0)
    if rows and rows[-1]["step"] > first and not latest_checkpoint(folder):
        raise ValueError(
            f"{folder / 'checkpoints'} holds no checkpoint, but the log reaches step {rows[-1]['step']}; restore the "
            "checkpoints, or delete metrics.jsonl to begin again"
        )


def changed_options(run_file: Path, config: TrainConfig) -> list[str]:
    """The options that differ from those of the run in `run_file`, as "--lr 0.015 -> 0.01"."""
    theirs = dataclasses.asdict(TrainConfig()) | read_run(run_file)
    ours = dataclasses.asdict(config)
    return [
        f"--{name.replace('_', '-')} {shown(theirs[name])} -> {shown(ours[name])}"
        for name in ours
        if name != "out" and theirs[name] != ours[name]
    ]


def check_same_text(run_file: Path, data: Prepared) -> None:
    """Raise ValueError if text or tokenizer differ from those of the run in `run_file`."""
    theirs = read_run_file(run_file)
    for name, ours in (("corpus", data.corpus_hash), ("tokenizer", data.tokenizer.hash)):
        if theirs[name].get("hash") != ours:
            raise ValueError(f"the {name} of the run in {run_file.parent} has changed since the run started")
