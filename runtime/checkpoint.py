"""Checkpoints: one complete directory each, written under another name and renamed, verified when read. No pickle.

runs/NAME/checkpoints/step-000600/
    config.json             the model's configuration, its kind of tokenizer, and the files of `--import`
    model.safetensors       weights and running statistics under our names; a tied head is stored once
    tokenizer*              what the tokenizer saves
    optimizer.safetensors   "{parameter name}.{state name}" -> tensor
    trainer.json            the rest of the training state
    manifest.json           SHA-256 of each of these
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from config import ModelConfig
from data.tokenizer import Tokenizer, load_tokenizer
from model import Llama
from runtime import distributed
from runtime.plugins import NotImported, import_records, warn_of_imports
from runtime.run_dir import newest_run

CONFIG, MODEL, OPTIMIZER, TRAINER, MANIFEST = (
    "config.json",
    "model.safetensors",
    "optimizer.safetensors",
    "trainer.json",
    "manifest.json",
)


def save_checkpoint(
    run: Path, step: int, model: Llama, tokenizer: Tokenizer, optimizers: list[Optimizer], trainer: dict, keep: int
) -> Path:
    """Save the complete state after `step` steps, and delete the oldest checkpoints until `keep` are left.

    `trainer` is anything JSON can hold. A checkpoint of the same step is replaced. Raises OSError if the disk is full;
    earlier checkpoints are intact then. Every rank must call it; rank 0 writes whole tensors.
    """
    checkpoints = run / "checkpoints"
    finished = checkpoints / f"step-{step:06d}"
    states = {MODEL: _stored_state(model), OPTIMIZER: _optimizer_state(model, optimizers)}
    tensors = {name: _gathered(state) for name, state in states.items()}
    if not distributed.is_main():
        return finished
    _clear(checkpoints)  # left by a process that was killed while saving
    unfinished = checkpoints / f".{finished.name}-unfinished"
    unfinished.mkdir(parents=True)
    earlier = [path for path in list_checkpoints(run) if _step(path) < step]
    try:
        _write_files(unfinished, model, tokenizer, tensors, {"step": step, "optimizers": _kinds(optimizers)} | trainer)
        if finished.exists():  # a directory cannot replace another one that has files
            _retire(finished)
        unfinished.rename(finished)
        for path in earlier[: max(0, len(earlier) - keep + 1)]:
            _retire(path)
        _sync(checkpoints)
    finally:
        _clear(checkpoints)
    return finished


def _write_files(
    folder: Path, model: Llama, tokenizer: Tokenizer, tensors: dict[str, dict[str, Tensor]], trainer: dict
) -> None:
    config = {"model": dataclasses.asdict(model.config), "tokenizer": tokenizer.kind, "imports": import_records()}
    (folder / CONFIG).write_text(json.dumps(config, indent=1))
    for name, state in tensors.items():
        _save_tensors(state, folder / name)
    tokenizer.save(folder)
    (folder / TRAINER).write_text(json.dumps(trainer, indent=1))
    manifest = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*folder.iterdir(), folder):
        _sync(path)


def _gathered(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with the sharded tensors gathered, one after another, in rank 0's main memory."""
    gathered = {}
    for name, tensor in state.items():
        full = distributed.whole(tensor)
        if distributed.is_main():
            gathered[name] = tensor if full is tensor else full.cpu()
    return gathered


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        path.touch()
        mode = path.stat().st_mode  # as the umask has it; safetensors lets nobody else read the file
        save_file(tensors, path)
        path.chmod(mode)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path} cannot be written: {error}") from None


def _retire(checkpoint: Path) -> None:
    """Rename, so that a process killed while deleting does not leave half a checkpoint under this name."""
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}-retired"))


def _clear(checkpoints: Path) -> None:
    """Delete unfinished and retired checkpoints."""
    for leftover in checkpoints.glob(".step-*"):
        shutil.rmtree(leftover)


# --- finding ---------------------------------------------------------------------------------------------------------


def list_checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run, the earliest first."""
    found = [path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=_step)


def latest_checkpoint(run: Path) -> Path | None:
    """The last finished checkpoint of a run, or None."""
    return next(reversed(list_checkpoints(run)), None)


def find_checkpoint(where: str | None) -> Path:
    """`where` if it is a checkpoint, the last checkpoint if it is a run, or that of the newest run for None.

    Raises ValueError if there is none.
    """
    where = where or str(newest_run())
    folder = Path(where)
    if (folder / MANIFEST).is_file():
        return folder
    last = latest_checkpoint(folder)
    if last is None:
        problem = "holds no checkpoint" if folder.is_dir() else "is not a directory"
        raise ValueError(f"{where} {problem}; name a run of train.py or one of its checkpoints")
    return last


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


# --- reading ---------------------------------------------------------------------------------------------------------


def load_model(checkpoint: Path, device: torch.device | str) -> tuple[Llama, Tokenizer]:
    """The model of a checkpoint on `device`, in evaluation mode, and its tokenizer.

    Raises ValueError, naming the file, if one is missing, damaged, or inconsistent with the others.
    """
    _verify(checkpoint, leave_out={OPTIMIZER, TRAINER})
    try:
        config = json.loads((checkpoint / CONFIG).read_text())
        warn_of_imports(config, checkpoint / CONFIG)
        with torch.device("meta"):
            model = Llama(ModelConfig(**config["model"]))
        tokenizer = load_tokenizer(config["tokenizer"], checkpoint)
    except NotImported:
        raise
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{checkpoint / CONFIG} does not describe a model of this version: {error}") from None
    model.load_state_dict(_read_weights(checkpoint, model), assign=True)
    if model.config.tie_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.to(device).eval(), tokenizer


def load_training_state(checkpoint: Path, model: Llama, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Restore weights and optimizer state bit for bit, and return the contents of trainer.json with its "step".

    Raises ValueError, naming the file, if one is missing, damaged, or of another model or optimizer.
    """
    _verify(checkpoint)
    trainer = json.loads((checkpoint / TRAINER).read_text())
    if trainer["optimizers"] != _kinds(optimizers):
        there, here = ", ".join(trainer["optimizers"]), ", ".join(_kinds(optimizers))
        raise ValueError(f"{checkpoint / OPTIMIZER} is of another optimizer: {there}, not {here}")
    weights, expected = _read_weights(checkpoint, model), model.state_dict()
    model.load_state_dict({name: distributed.sharded_like(weights[name], expected[name]) for name in weights})
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(checkpoint / OPTIMIZER).items():
        name, _, state = key.rpartition(".")
        # A copy, because matrix products round differently at other alignments, and a file's can be any.
        states.setdefault(name, {})[state] = tensor.clone()
    names = _parameter_names(model)
    for optimizer in optimizers:
        packed = optimizer.state_dict()
        parameters = (weight for group in optimizer.param_groups for weight in group["params"])
        packed["state"] = {
            index: {
                key: distributed.sharded_like(tensor, weight) if tensor.shape == weight.shape else tensor
                for key, tensor in states.pop(names[id(weight)], {}).items()
            }
            for index, weight in enumerate(parameters)
        }
        packed["state"] = {index: state for index, state in packed["state"].items() if state}
        optimizer.load_state_dict(packed)
    assert not states, f"no optimizer updates {_abridged(states)}"
    return trainer


def _read_weights(checkpoint: Path, model: Llama) -> dict[str, Tensor]:
    """The state of `model` from the file. Raises ValueError, naming the differences, if it is of another model."""
    path = checkpoint / MODEL
    found, expected = load_file(path), _stored_state(model)
    missing, unknown = expected.keys() - found.keys(), found.keys() - expected.keys()
    wrong_shape = {name for name in expected.keys() & found.keys() if expected[name].shape != found[name].shape}
    problems = {"lacks": missing, "has an unknown": unknown, "has another shape of": wrong_shape}
    if any(problems.values()):
        listed = "; ".join(f"{problem} {_abridged(names)}" for problem, names in problems.items() if names)
        raise ValueError(f"{path} is of another model: it {listed}")
    if model.config.tie_embeddings:
        found["lm_head.weight"] = found["embed_tokens.weight"]
    return found


def _stored_state(model: Llama) -> dict[str, Tensor]:
    """The state that the file holds: a tied head is stored as the embedding only."""
    state = model.state_dict()
    if model.config.tie_embeddings:
        del state["lm_head.weight"]
    return state


def _kinds(optimizers: list[Optimizer]) -> list[str]:
    return [type(optimizer).__name__ for optimizer in optimizers]


def _parameter_names(model: Llama) -> dict[int, str]:
    return {id(weight): name for name, weight in model.named_parameters()}


def _optimizer_state(model: Llama, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    names = _parameter_names(model)
    return {
        f"{names[id(weight)]}.{key}": tensor
        for optimizer in optimizers
        for weight, state in optimizer.state.items()
        for key, tensor in state.items()
    }


# --- integrity -------------------------------------------------------------------------------------------------------


def _verify(checkpoint: Path, leave_out: Collection[str] = ()) -> None:
    """Raise ValueError, naming the file, unless every file of the checkpoint matches the manifest."""
    path = checkpoint / MANIFEST
    try:
        manifest = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        raise ValueError(f"{path} is missing or damaged; use another checkpoint") from None
    for name in manifest.keys() - leave_out:
        path = checkpoint / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; use another checkpoint")
        if _sha256(path) != manifest[name]:
            raise ValueError(f"{path} is damaged: its SHA-256 differs from the manifest's; use another checkpoint")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a directory
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _abridged(names: Iterable[str]) -> str:
    """The first of `names` and how many more, for one line."""
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
