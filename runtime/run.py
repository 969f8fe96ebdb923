"""The run that flags describe: a new one, or one to continue or evaluate."""

import argparse
import math
import os
import platform
import secrets
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

from config import DEFAULTS, MAX_SIZE, ModelConfig, TrainConfig, configs_from, flag_name, require, shown
from data.corpus import Corpus
from data.prepare import Prepared, prepare
from files import warn
from model import Llama, matrices
from norms import TRAITS
from runtime import distributed
from runtime.checkpoint import TRAINING_STATE, find_checkpoint, intact_checkpoint, list_checkpoints
from runtime.device import COMPILE_FLOPS, COMPILE_STEPS, describe, pick_device, pick_dtype
from runtime.huggingface.directory import open_model, read_tokenizer
from runtime.machine import check_compile, missing_for_compile
from runtime.plugins import ROOT, check_imported_norm, import_records, warn_of_imports
from runtime.run_dir import (
    RUNS_FOLDER,
    check_not_in_use,
    check_run_dir,
    make_run_dir,
    newest_run,
    read_rows,
    read_run_file,
)

FIXED_ON_RESUME = ("tokenizer", "seed", "batch_size", "optimizer")


@dataclass
class Run:
    """A resolved run: where it is stored, what is trained, how, and on what."""

    folder: Path
    model_config: ModelConfig
    config: TrainConfig
    device: torch.device
    dtype: torch.dtype
    data: Prepared
    command: list[str]
    earlier: dict[str, Any] | None = None  # the run.json of the run that is continued or evaluated


def resolve_run(flags: argparse.Namespace) -> Run:
    """Turn flags into a run. Raises ValueError for incompatible options. All ranks get the same run or error."""
    launch = distributed.launch()
    with distributed.raise_on_all_ranks():
        run = resolve_settings(flags, launch)
    run.config, run.dtype = distributed.from_main(lambda: (run.config, run.dtype))  # where ranks timed differently
    if run.earlier is None and not flags.eval_only:
        out = run.folder if getattr(flags, "out", "") else None
        run.folder = distributed.from_main(make_run_dir, out, run.folder.name)
    torch.set_float32_matmul_precision("high" if run.config.tf32 else "highest")
    return run


def resolve_settings(flags: argparse.Namespace, launch: list[str]) -> Run:
    """Resolve the run without writing anything. Cheap checks run first.

    If this `launch` of torchrun has started the run in --out, it is a restart, which continues it.
    """
    out = Path(flags.out) if getattr(flags, "out", "") else None
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    require(out or not may_restart, "torchrun --max-restarts needs --out, to find the run again")
    other_text = flags.eval_only and (getattr(flags, "val_data", []) or getattr(flags, "data", []))
    existing = flags.resume or (flags.eval_only and not getattr(flags, "init_from", ""))
    if existing:
        require(not (flags.preset or (flags.config and out)), "--preset and --config are for new runs; leave them out")
        out = out or (Path(flags.config).parent if flags.config else newest_run())
    elif launch and out and (out / "run.json").exists():
        existing = not set(launch).isdisjoint(read_run_file(out / "run.json").get("launch") or [])
    if out:
        if distributed.is_main() and not flags.eval_only:
            check_not_in_use(out)
        check_run_dir(out, existing)
    earlier = read_run_file(out / "run.json") if out and existing else None
    model_config, config = resolve(flags, earlier)
    changed = check_same_run(out, earlier, model_config, config) if out and earlier else []
    above = (out or RUNS_FOLDER / "new").resolve().parents
    paths = {*config.data, *config.val_data} - {"python", "shakespeare"}
    inside = any(Path(path).resolve() in above for path in paths)
    require(not inside, f"--data contains {out or RUNS_FOLDER}, where the run is written; choose an --out elsewhere")
    names, val_names, cache, column = config.data, config.val_data, Path(config.cache_dir), config.text_column
    if other_text and earlier and Corpus(names, cache, val_names, column).hash == earlier["corpus"]["hash"]:
        other_text = []  # it is the run's own, perhaps in another place
    tokenizer = None
    if config.init_from or other_text:
        saved = intact_checkpoint(out, TRAINING_STATE) if out and earlier else None  # DIR may be gone by now
        tokenizer = read_tokenizer(saved or find_checkpoint(config.init_from or out))
    if other_text:
        names, val_names = [], other_text
        config = replace(config, eval_tokens=getattr(flags, "eval_tokens", MAX_SIZE))
    vocab_size, context = model_config.vocab_size, model_config.context
    data = prepare(names, config.tokenizer, vocab_size, cache, context, tokenizer, val_names, column)
    for name, here in (("corpus", data.corpus_hash), ("tokenizer", data.tokenizer.hash)):
        same = other_text or not earlier or earlier[name]["hash"] == here
        require(same, f"the run in {out} was trained with another {name}; start a new run for this one")
    if changed and distributed.is_main():
        print(f"changed: {', '.join(changed)}", file=sys.stderr)
    folder = out or RUNS_FOLDER / f"{data.corpus_name}-{model_config.norm}-{model_config.placement}"
    device = pick_device(config.device)
    return Run(folder, model_config, config, device, pick_dtype(config.dtype, device), data, flags.command, earlier)


def resolve(flags: argparse.Namespace, earlier: dict[str, Any] | None = None) -> tuple[ModelConfig, TrainConfig]:
    """The configurations, with everything that depends on the machine decided. A run that exists is `earlier`."""
    given, pretrained = read_options(flags.config, earlier), None
    init_from = getattr(flags, "init_from", "") or given.get("init_from")
    if init_from and not earlier:
        directory = find_checkpoint(init_from)  # verified before the text is prepared
        model, _ = open_model(directory)
        pretrained = asdict(model.config) | {"tokenizer": read_tokenizer(directory).kind}
    device = pick_device(getattr(flags, "device", given.get("device", "auto")))
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf
    model_config, config = configs_from(flags, device.type, given, pretrained, memory)
    longest = pretrained and (pretrained["trained_context"] or pretrained["context"])
    if longest and model_config.context > longest:
        warn(f"--context {model_config.context} is longer than that of --init-from, which is {longest}")
    device, ranks = pick_device(config.device), distributed.world_size()
    distributed.check_device(device)
    check_imported_norm(model_config, device)
    installed = config.log == "none" or find_spec(config.log)
    require(installed, f"--log {config.log} needs the package {config.log}: pip install {config.log}")
    dtype = str(pick_dtype(config.dtype, device, config.shard and ranks > 1)).removeprefix("torch.")
    compiled = config.compile
    if compiled is None:
        with torch.device("meta"):
            weights = sum(weight.numel() for _, _, weight in matrices(Llama(model_config)))
        step_flops = 6 * weights * config.batch_size * model_config.context
        long = {"cuda": config.steps >= COMPILE_STEPS, "cpu": config.steps * step_flops >= COMPILE_FLOPS}
        compiled = long.get(device.type, False)
    if config.compile:
        check_compile(device)
    elif compiled and (missing := missing_for_compile(device)):
        warn(f"not compiled: torch.compile needs {missing}")
        compiled = False
    shard = distributed.resolve_shard(config.shard, getattr(flags, "shard", False), dtype, ranks)
    config = replace(config, device=str(device), dtype=dtype, compile=compiled, shard=shard, out="")
    check_options(model_config, config, ranks)
    return model_config, config


def read_options(config: str | None, run: dict[str, Any] | None = None) -> dict[str, Any]:
    """The options of `run` or of the run.json that `--config` names. Prints which of its imports have changed."""
    if config and not run:
        run = read_run_file(Path(config))
    if not run:
        return {}
    warn_of_imports(run)
    return run["model"] | run["training"]


def check_options(model_config: ModelConfig, config: TrainConfig, ranks: int) -> None:
    """Raise ValueError if this model and these options cannot be trained on `ranks` ranks."""
    norm = model_config.norm
    if not TRAITS[norm].per_token:
        require(not config.recompute, f"--recompute does not support --norm {norm}: it would update statistics twice")
        require(ranks == 1, f"--norm {norm} supports only one rank: its statistics are not synchronized")
        if config.micro_batch_size < config.batch_size:
            parts = f"each micro-batch of {config.micro_batch_size}, not over the batch of {config.batch_size}"
            warn(f"warning: --norm {norm} computes its statistics over {parts}; --micro-batch-size changes that")
    require(not (config.watch and config.shard), "--watch needs whole weights on each rank; use --no-shard")
    rows, micro = config.batch_size // ranks, config.micro_batch_size
    if config.batch_size % ranks or rows % min(rows, micro):
        parts = f"{ranks} ranks with --micro-batch-size {micro}"
        raise ValueError(f"--batch-size {config.batch_size} cannot be split evenly over {parts}")


def check_same_run(folder: Path, run: dict[str, Any], model_config: ModelConfig, config: TrainConfig) -> list[str]:
    """Options that differ. Raises ValueError if they cannot change, or if the checkpoints are missing."""
    fixed, changed, there = [], [], run["model"] | run["training"]
    for name, here in (asdict(model_config) | asdict(config)).items():
        before = there.get(name, DEFAULTS[name])
        flag = f"{flag_name(name)} {shown(before)}"
        if before == here:
            continue
        if name in run["model"] or name in FIXED_ON_RESUME:
            fixed.append(f"{flag}, not {shown(here)}")
        else:
            changed.append(f"{flag} -> {shown(here)}")
    require(not fixed, f"the run in {folder} has {'; '.join(fixed)}; start a new run to change that")
    rows = read_rows(folder / "metrics.jsonl")
    read_rows(folder / "watch.jsonl")  # refuses a damaged one
    last = rows[-1] if rows else {"step": 0}
    first = min(there["save_every"], there["steps"])  # which is saved before it is evaluated
    saved = last["step"] > first or (last["step"] == first and "val_loss" in last)
    kept = list_checkpoints(folder) or not saved
    require(kept, f"{folder}/checkpoints holds no checkpoint; restore it, or delete metrics.jsonl to begin again")
    return changed


def describe_run(run: Run, parameters: int) -> dict[str, Any]:
    """The contents of `run.json`: what is needed to repeat the run, and what it ran on. All ranks call it."""
    return {
        "model": asdict(run.model_config),
        "training": asdict(run.config),
        "parameters": parameters,
        "corpus": {"name": run.data.corpus_name, "hash": run.data.corpus_hash},
        "tokenizer": {"kind": run.data.tokenizer.kind, "hash": run.data.tokenizer.hash},
        "imports": import_records(),
        "commit": commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": describe(run.device),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "ranks": distributed.world_size(),
        "launch": distributed.launch(),
        "command": run.command,
        "id": secrets.token_hex(4),  # Weights & Biases knows the run by it, also when it is resumed
    }


def commit() -> str | None:
    """The commit of this code, marked if code differs from it. None outside a clone."""
    if not (ROOT / ".git").exists() or not which("git"):
        return None
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    head = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
    changed = git(["git", "status", "--porcelain", "--untracked-files=no", "*.py", "*.c"]).stdout
    return f"{head}-dirty" if changed else head or None
