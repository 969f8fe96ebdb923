"""Checkpoints: one complete directory each, written under another name and renamed, verified when read. No pickle.

runs/NAME/checkpoints/step-000600/
    config.json             Hugging Face's configuration; under one key ours, the kind of tokenizer, and --import files
    model.safetensors       weights and running statistics under Hugging Face's names; a tied head is stored once
    tokenizer*, ...         what the tokenizer saves, and a generation_config.json that came with the model
    optimizer.safetensors   "{parameter name}.{state name}" -> tensor
    trainer.json            the rest of the training state, also numbers of optimizers; the step and the run's id
    manifest.json           SHA-256 of each of these
"""

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from data.tokenizer import Tokenizer
from files import Json, describe_write_error, read_json, require, sha256, sync, warn
from machine import distributed
from model import Llama
from runtime.huggingface.directory import open_model, read_config, read_model, read_tokenizer, stored_state, write_model
from runtime.huggingface.weights import StoredTensor, save_tensors, stored_tensors, weight_files
from runtime.run_dir import newest_run

OPTIMIZER, TRAINER, MANIFEST = "optimizer.safetensors", "trainer.json", "manifest.json"
TRAINING_STATE = {OPTIMIZER, TRAINER}  # files that a model alone does not need


# --- saving ----------------------------------------------------------------------------------------------------------


def save_checkpoint(
    run: Path, step: int, model: Llama, tokenizer: Tokenizer, optimizers: list[Optimizer], trainer: dict, keep: int
) -> Path:
    """Save the complete state after `step` steps, and delete the oldest checkpoints until `keep` are left.

    A checkpoint of the same step is replaced. Raises OSError if the disk is full; earlier ones are intact then. Every
    rank must call it; rank 0 writes whole tensors.
    """
    checkpoints = run / "checkpoints"
    finished = checkpoints / f"step-{step:06d}"
    unfinished = checkpoints / f".{finished.name}-unfinished"
    names: dict[Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    states = [(names[weight], state) for optimizer in optimizers for weight, state in optimizer.state.items()]
    values = {f"{name}.{key}": value for name, state in states for key, value in state.items()}
    numbers = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    weights = _gathered(stored_state(model))
    state = _gathered({name: value for name, value in values.items() if name not in numbers})
    described = {"step": step, "numbers": numbers} | trainer

    def retire(checkpoint: Path) -> None:  # A process killed while deleting would leave half of one under its name.
        checkpoint.rename(checkpoints / f".{checkpoint.name}-retired")

    def write() -> None:
        try:
            with describe_write_error(finished, sum(tensor.nbytes for tensor in (*weights.values(), *state.values()))):
                checkpoints.mkdir(exist_ok=True)  # not the run's folder, which may have been moved
                unfinished.mkdir()
                write_model(unfinished, model, weights, tokenizer)
                save_tensors(state, unfinished / OPTIMIZER)
                (unfinished / TRAINER).write_text(json.dumps(described, indent=1))
                hashes = {path.name: sha256(path) for path in sorted(unfinished.iterdir())}
                (unfinished / MANIFEST).write_text(json.dumps(hashes, indent=1))
                for path in (*unfinished.iterdir(), unfinished):
                    sync(path)
                if finished.exists():  # a directory cannot replace another one that has files
                    retire(finished)
                unfinished.rename(finished)
                for path in (checkpoints, run):  # the new one is on the disk before others are deleted
                    sync(path)
                there = list_checkpoints(run)
                for path in there[: max(0, there.index(finished) - keep + 1)]:
                    retire(path)
        finally:
            clear_unfinished(run)

    distributed.from_main(write)
    return finished


def _gathered(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with the sharded tensors gathered, one after another, in rank 0's main memory."""
    gathered = {}
    for name, tensor in state.items():
        whole = distributed.full_tensor(tensor)
        if distributed.is_main():
            gathered[name] = tensor if whole is tensor else whole.cpu()
    return gathered


def clear_unfinished(run: Path) -> None:
    """Delete unfinished and retired checkpoints: what a process that was killed while saving has left."""
    for leftover in (run / "checkpoints").glob(".step-*"):
        shutil.rmtree(leftover)


def save_pretrained(directory: str | Path, model: Any, tokenizer: Tokenizer) -> None:
    """Write a Llama, also a compiled or averaged one or one in DDP, and its tokenizer into a new or empty directory.

    `load_pretrained` opens it, and so does `transformers`, if it has the architecture; else config.json says why not.
    What was written is read again. Raises ValueError, naming the tensor, and leaves no files if it cannot be loaded.
    """
    while type(model).__name__ in ("OptimizedModule", "AveragedModel", "DistributedDataParallel"):
        (model,) = model.children()
    require(isinstance(model, Llama), f"only a Llama can be saved, not a {type(model).__name__}")
    directory, state = Path(directory), stored_state(model)
    directory.mkdir(parents=True, exist_ok=True)
    require(not any(directory.iterdir()), f"{directory} is not empty; name a new directory")
    try:
        with describe_write_error(directory, sum(tensor.nbytes for tensor in state.values())):
            write_model(directory, model, state, tokenizer)
            read_tokenizer(written := read_config(directory))
            for stored in open_model(written)[1].values():
                stored.read()
    except BaseException:
        for path in directory.iterdir():
            path.unlink()
        raise


# --- finding ---------------------------------------------------------------------------------------------------------


def list_checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run, the earliest first."""
    found = [path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=lambda path: (len(path.name), path.name))  # a step may have more digits


def find_checkpoint(where: str | Path | None) -> Path:
    """`where` if it is a checkpoint or a Hugging Face directory, or the last intact checkpoint of a run; None is the
    newest run. Raises ValueError if there is none, or if what a model needs of it is damaged.
    """
    folder = Path(newest_run() if where is None else where)
    if (folder / MANIFEST).is_file() or (folder / TRAINER).is_file():
        verify(folder, leave_out=TRAINING_STATE)
        return folder
    found = folder if (folder / "config.json").is_file() else intact_checkpoint(folder, leave_out=TRAINING_STATE)
    if found is None:
        raise ValueError(f"{folder} has no checkpoint; name a run, one of its checkpoints, or a Hugging Face directory")
    return found


def intact_checkpoint(run: Path, leave_out: Collection[str] = ()) -> Path | None:
    """The last intact checkpoint of a run, or None. A line says if a later one is damaged, a ValueError if all are."""
    problem = ""
    for checkpoint in reversed(list_checkpoints(run)):
        try:
            verify(checkpoint, leave_out)
        except (OSError, ValueError) as error:
            problem = problem or str(error)
        else:
            if problem:
                warn(f"warning: {problem}; going back to {checkpoint.name}")
            return checkpoint
    require(not problem, f"{problem}; no other checkpoint of {run} is intact")
    return None


# --- reading ---------------------------------------------------------------------------------------------------------


def load_pretrained(directory: str | Path, device: torch.device | str = "cpu") -> tuple[Llama, Tokenizer]:
    """The model of what `find_checkpoint` finds, in evaluation mode, and its tokenizer.

    Raises ValueError, naming the file, if one is missing, damaged or inconsistent.
    """
    _, model, tokenizer = open_checkpoint(directory, device)
    return model, tokenizer


def open_checkpoint(where: str | Path | None, device: torch.device | str = "cpu") -> tuple[Path, Llama, Tokenizer]:
    """What `find_checkpoint` finds, and what `load_pretrained` returns for it."""
    checkpoint = find_checkpoint(where)
    tokenizer = read_tokenizer(source := read_config(checkpoint))
    return checkpoint, read_model(source).to(device).eval(), tokenizer


def weight_hashes(checkpoint: Path) -> Json:
    """Where a checkpoint is, and the SHA-256 of each of its files of weights. A manifest has been verified."""
    known = read_json(checkpoint / MANIFEST, dict[str, str]) if (checkpoint / MANIFEST).is_file() else {}
    hashes = {path.name: known.get(path.name) or sha256(path) for path in weight_files(checkpoint)}
    return {"directory": str(checkpoint.resolve()), "sha256": hashes}


def load_weights(weights: dict[str, StoredTensor], model: Llama) -> None:
    """Copy stored weights into `model`, which may be sharded, one tensor after another."""
    expected = stored_state(model)
    for name, stored in weights.items():
        distributed.copy(expected[name], stored.read())


def load_checkpoint(checkpoint: Path, model: Llama, optimizers: list[Optimizer]) -> Json:
    """Restore weights and optimizer state of an intact checkpoint bit for bit. Returns what trainer.json contains."""
    source, run_file = read_config(checkpoint), checkpoint.parents[1] / "run.json"
    require(source.config == model.config, f"{checkpoint} does not match the model in {run_file}")
    load_weights(open_model(source)[1], model)
    weights = dict(model.named_parameters())
    owners = {weight: each for each in optimizers for group in each.param_groups for weight in group["params"]}
    for stored in stored_tensors(checkpoint / OPTIMIZER).values():
        name, _, key = stored.name.rpartition(".")
        weight, tensor = weights[name], stored.read()
        if tensor.shape == weight.shape:
            tensor = distributed.sharded_like(tensor, weight)
        owners[weight].state[weight][key] = tensor.to(weight.device)
    trainer = json.loads((checkpoint / TRAINER).read_bytes())
    for full_name, number in trainer.get("numbers", {}).items():
        name, _, key = full_name.rpartition(".")
        owners[weights[name]].state[weights[name]][key] = number
    return trainer


def verify(checkpoint: Path, leave_out: Collection[str] = ()) -> None:
    """Raise ValueError, naming the file, unless every file but those in `leave_out` matches the manifest."""
    hashes = read_json(checkpoint / MANIFEST, dict[str, str])
    require(hashes.keys() >= TRAINING_STATE, f"{checkpoint / MANIFEST} is damaged: it does not list all files")
    for name in hashes.keys() - leave_out:
        file = checkpoint / name
        intact = file.is_file() and sha256(file) == hashes[name]
        require(intact, f"{file} is missing or damaged: its SHA-256 does not match the manifest")
