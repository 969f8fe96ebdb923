"""The run that was asked for: a new one, or one to continue or evaluate."""

import math
import os
import platform
import secrets
import shutil
import subprocess
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from config import DEFAULTS, MAX_SIZE, Asked, ModelConfig, TrainConfig, changed_options, combine, configure, fields_of
from data.batches import find_token_files
from data.corpus import Corpus
from data.prepare import Prepared, prepare
from data.pretrained import read_directory
from data.tokenizer import TOKENIZER_KINDS, NoTokenizer, Tokenizer
from files import ROOT, digest, require, sha256, warn
from machine import distributed
from machine.device import check_compile, describe, has_device, pick_device, pick_dtype
from norms import TRAITS
from runtime.checkpoint import TRAINING_STATE, find_checkpoint, intact_checkpoint, weight_hashes
from runtime.huggingface.directory import StoredModel, open_model, read_config, read_tokenizer
from runtime.plugins import check_imported_norm, import_records, warn_of_imports
from runtime.run_dir import RUNS_FOLDER, RunFile, check_has_no_run, load_run, make_run_dir, newest_run, read_run_file

COMPILED_PASSES, COMPILED_FLOPS = 530, 5e13  # runs that are compiled have so many, on a GPU and on a CPU


@dataclass
class Run:
    """A resolved run: where it is stored, what is trained, how, and on what."""

    folder: Path
    asked: Asked
    model_config: ModelConfig
    config: TrainConfig
    data: Prepared
    command: list[str]
    earlier: RunFile | None = None  # the run.json of the run that is continued or evaluated
    source: StoredModel | None = None  # what --init-from names, unless the run has its own weights
    id: str = ""  # its checkpoints have it, and Weights & Biases knows the run by it

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.device)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)


def open_run(asked: Asked, command: list[str]) -> Run:
    """The run that was `asked` for. All ranks get the same, or the same ValueError for incompatible options."""
    launch = distributed.torchrun_folders()
    with distributed.raise_on_all_ranks():
        run = find_run(asked, command, launch)
    run.config = distributed.from_main(lambda: run.config)  # machines may differ
    if run.earlier is None and not asked.get("eval_only"):
        run.folder = distributed.from_main(make_run_dir, run.folder if asked.get("out") else None, run.folder.name)
    torch.set_float32_matmul_precision("high" if run.config.tf32 else "highest")
    return run


def find_run(asked: Asked, command: list[str], launch: list[str]) -> Run:
    """Resolve the run without writing anything. Cheap checks run first."""
    eval_only = asked.get("eval_only", False)
    text = asked.get("val_data") or asked.get("data") or []
    both = eval_only and asked.get("val_data") and asked.get("data")
    require(not both, "--eval-only takes --data or --val-data, not both")
    own_weights = asked.get("resume") or (eval_only and not text)
    for_new = "--init-from is for new runs, or for --eval-only with --data; a run has its own weights"
    require(not (own_weights and asked.get("init_from")), for_new)
    folder, earlier = find_folder(asked, launch)
    everything, model, config, tokenizer, source = resolve(asked, earlier or read_config_file(asked), bool(earlier))
    changed, fixed = changed_options(earlier["resolved"], model, config) if earlier else ([], [])
    require(not fixed, f"the run in {folder} has {'; '.join(fixed)}; start a new run to change that")
    above = (folder or RUNS_FOLDER / "new").resolve().parents
    paths = {*config.data, *config.val_data} - {"python", "shakespeare"}
    inside = not eval_only and any(Path(os.path.realpath(path)) in above for path in paths)
    require(not inside, f"--data contains {folder or RUNS_FOLDER}, where the run is written; choose an --out elsewhere")
    names, val_names = config.data, config.val_data
    text = other_text(text, config, earlier) if eval_only else []
    if text:
        names, val_names = [], text
        config = replace(config, eval_tokens=asked.get("eval_tokens", MAX_SIZE))
        tokenizer = tokenizer or read_tokenizer(read_config(find_checkpoint(folder)))
    elif earlier and folder and (config.init_from or config.tokenizer not in TOKENIZER_KINDS):
        saved = intact_checkpoint(folder, TRAINING_STATE)  # DIR may be gone by now
        if saved or config.init_from:
            stored = read_config(saved or find_checkpoint(config.init_from))
            tokenizer, source = read_tokenizer(stored), None if saved else stored
    cache, size, column = Path(config.cache_dir), model.vocab_size, config.text_column
    data = prepare(names, config.tokenizer, size, cache, model.context, tokenizer, val_names, column)
    for name, here in (("corpus", data.corpus_hash), ("tokenizer", data.tokenizer.hash)):
        known = text or not earlier or earlier[name]["hash"] == here
        require(known, f"the run in {folder} was trained with another {name}; start a new run for this one")
    if changed and not eval_only:
        warn(f"changed: {', '.join(changed)}")
    folder = folder or RUNS_FOLDER / f"{data.corpus_name}-{model.norm}-{model.placement}"
    id = (earlier or {}).get("id", secrets.token_hex(4))
    return Run(folder, everything, model, config, data, command, earlier, source, id)


def find_folder(asked: Asked, launch: list[str]) -> tuple[Path | None, RunFile | None]:
    """The folder of the run, if it is known yet, and its run.json if it is to be continued or evaluated.

    If this `launch` of torchrun has started the run in --out, it is a restart, which continues it.
    """
    out, file = (Path(asked[name]) if asked.get(name) else None for name in ("out", "config"))
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    require(out or not may_restart, "torchrun --max-restarts needs --out, to find the run again")
    if asked.get("resume") or (asked.get("eval_only") and not asked.get("init_from")):
        require(not ("preset" in asked or (file and out)), "--preset and --config are for new runs; leave them out")
        folder = out or (file.parent if file else newest_run())
        return folder, load_run(folder)
    earlier = read_run_file(out / "run.json") if out and (out / "run.json").is_file() else {}
    if out and not set(launch).isdisjoint(earlier.get("launch") or []):
        return out, load_run(out)
    if out and distributed.is_main():
        check_has_no_run(out)
    return out, None


def other_text(text: list[str], config: TrainConfig, earlier: RunFile | None) -> list[str]:
    """`text`, or nothing if it is the run's own, of which a part is held out. A line says if it was trained on."""
    if earlier and text == config.data and not config.val_data:
        own = Corpus(text, Path(config.cache_dir), (), config.text_column)  # perhaps copies of its files
        if own.hash == earlier["corpus"]["hash"]:
            return []
    trained = [Path(name).resolve() for name in earlier["resolved"]["data"]] if earlier else []
    for path in map(Path.resolve, map(Path, text)):
        if any(path.is_relative_to(each) or each.is_relative_to(path) for each in trained):
            warn(f"warning: the run was trained on text of {path}")
    return text


def read_config_file(asked: Asked) -> RunFile | None:
    """The run.json that --config names, if any."""
    if "config" not in asked:
        return None
    require("preset" not in asked, "use either --preset or --config, not both")
    return read_run_file(Path(asked["config"]))


def resolve(
    asked: Asked, previous: RunFile | None = None, continues: bool = False
) -> tuple[Asked, ModelConfig, TrainConfig, Tokenizer | None, StoredModel | None]:
    """What was asked, with the preset, the configurations that follow on this machine, and what `open_files` opened.

    `previous` is the run.json of the run that goes on, if this `continues` one, or whose options are taken. Raises
    ValueError for what this machine cannot do.
    """
    asked = {name: value for name, value in asked.items() if name in DEFAULTS.keys() - {"out"} | {"preset", "recipe"}}
    before, kept = (previous["asked"], previous["resolved"]) if previous else ({}, {})
    if previous:
        warn_of_imports(previous["imports"], added=continues)
    there = kept.get("device", "auto")  # another machine may lack it
    device = pick_device(asked.get("device") or (there if has_device(there) else before.get("device", "auto")))
    if not previous:
        asked = {"preset": "tiny" if device.type == "cpu" else "small"} | asked
    everything = combine(before, asked)
    tokenizer, source, found = (None, None, Asked()) if continues else open_files(everything)
    if continues and everything.get("init_from"):  # DIR may be gone by now
        found = {name: kept[name] for name in (*ModelConfig.__annotations__, "tokenizer")}
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf
    if device.type == "mps":
        # The limits are CUDA's: 12 GB for 64 sequences of `small`. In fp32 with all scores of attention, they need 16.
        memory = 0.75 * torch.mps.recommended_max_memory()
    keeps = {"asked": {"lr": kept["lr"]} | before} if continues else {}  # not derived again, amid its schedule
    model, training = configure(asked, found, previous and previous | keeps, memory)
    if everything.get("init_from") and not continues:
        longest = found["trained_context"] or found["context"]
        if model.context > longest:
            warn(f"--context {model.context} is longer than that of --init-from, which is {longest}")
    needed = tokenizer.text_vocab_size if tokenizer else 0
    too_small = f"--vocab-size {model.vocab_size} is too small: --tokenizer {training.tokenizer} has {needed} ids"
    require(needed <= model.vocab_size, too_small)
    distributed.check_device(device)
    check_imported_norm(model, device)
    installed = training.log == "none" or find_spec(training.log)
    require(installed, f"--log {training.log} needs the package {training.log}: pip install {training.log}")
    ranks = distributed.world_size()
    shard = training.shard and (ranks > 1 or "shard" in asked)
    dtype = str(pick_dtype(training.dtype, device, shard)).removeprefix("torch.")
    compiled = pays_to_compile(model, training, device, ranks) if training.compile is None else training.compile
    compiled = compiled and check_compile(device, bool(asked.get("compile")))
    training = replace(training, device=str(device), dtype=dtype, compile=compiled, shard=shard, out="")
    check_options(model, training, ranks)
    return everything, model, training, tokenizer, source


def open_files(asked: Asked) -> tuple[Tokenizer | None, StoredModel | None, Asked]:
    """The tokenizer in a file, the model in --init-from, and the options that follow; see `configure`."""
    if asked.get("init_from"):
        source = read_config(find_checkpoint(asked["init_from"]))
        tokenizer = read_tokenizer(source)
        return tokenizer, source, asdict(open_model(source)[0].config) | {"tokenizer": tokenizer.kind}
    if "tokenizer" not in asked and find_token_files([*asked.get("data", ()), *asked.get("val_data", ())]):
        return None, None, {"tokenizer": NoTokenizer.kind}
    kind = (DEFAULTS | asked)["tokenizer"]
    own = None if kind in TOKENIZER_KINDS else read_directory(Path(kind))
    return own, None, {"vocab_size": own.vocab_size} if own else {}


def pays_to_compile(model: ModelConfig, training: TrainConfig, device: torch.device, ranks: int) -> bool:
    """Whether a run is so long that torch.compile saves more time than it takes.

    On an H200, blocks take 14 s · 4.15 / 10.96 = 5.3 s and save 10 ms a pass (docs/measured.md): 530 passes. On two
    cores they take 10 to 20 s, and save a tenth of the five to ten minutes that so many FLOPs take.
    """
    if device.type == "cuda":
        passes = training.steps * max(1, training.batch_size // (training.micro_batch_size * ranks))
        return passes >= COMPILED_PASSES
    weights = 12 * model.layers * model.dim**2  # about
    flops = 6 * weights * model.context * training.batch_size * training.steps
    return device.type == "cpu" and flops >= COMPILED_FLOPS


def check_options(model: ModelConfig, config: TrainConfig, ranks: int) -> None:
    """Raise ValueError if this model and these options cannot be trained on `ranks` ranks."""
    batch_size, micro, norm = config.batch_size, config.micro_batch_size, model.norm
    if not TRAITS[norm].per_token:
        require(not config.recompute, f"--recompute does not support --norm {norm}: it would update statistics twice")
        require(ranks == 1, f"--norm {norm} supports only one rank: its statistics are not synchronized")
        if micro < batch_size:
            parts = f"each micro-batch of {micro}, not over the batch of {batch_size}"
            warn(f"warning: --norm {norm} computes its statistics over {parts}; --micro-batch-size changes that")
    if config.shard:
        require(ranks > 1, "--shard needs several ranks, which torchrun --nproc-per-node starts")
        require(config.dtype != "float16", "--shard needs --dtype float32 or bfloat16, which need no loss scale")
        require(not config.watch, "--watch needs whole weights on each rank; use --no-shard")
    even = batch_size % ranks == 0 and (batch_size // ranks) % min(batch_size // ranks, micro) == 0
    parts = f"{ranks} ranks with --micro-batch-size {micro}"
    require(even, f"--batch-size {batch_size} cannot be split evenly over {parts}")


def describe_run(run: Run, parameters: int) -> RunFile:
    """The contents of `run.json`: what is needed to repeat the run, and what it ran on. All ranks call it."""
    origin = {"weights_from": weight_hashes(run.source.directory)} if run.source and distributed.is_main() else {}
    return {
        "asked": run.asked,
        "resolved": fields_of(run.model_config, run.config),
        "parameters": parameters,
        "corpus": {"name": run.data.corpus_name, "hash": run.data.corpus_hash},
        "tokenizer": {"kind": run.data.tokenizer.kind, "hash": run.data.tokenizer.hash, "lost": run.data.lost},
        "imports": import_records(),
        "commit": commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": describe(run.device),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "ranks": distributed.world_size(),
        "launch": distributed.torchrun_folders(),
        "command": run.command,
        **origin,
        "id": run.id,
    }


def commit() -> str | None:
    """The commit of this code and, if code differs from it, a hash of the files that do. None outside a clone."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return None

    def git(command: str) -> str:
        return subprocess.run(f"git {command}".split(), cwd=ROOT, capture_output=True, text=True).stdout

    head = git("rev-parse --short=12 HEAD").strip()
    others = ":!tests :!results :!examples :!*site-packages*"  # the last are packages of an environment
    lines = git(f"status --porcelain -z -uall --no-renames *.py *.c {others}").split("\0")
    names = [line[3:] for line in lines if "/" in line or line[:1] not in ("?", "")]  # new files count in folders only
    hashes = [(name, (ROOT / name).exists() and sha256(ROOT / name)) for name in names]
    return f"{head}-dirty-{digest(hashes)[:12]}" if names else head or None
