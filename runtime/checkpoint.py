"""Checkpoints: a whole directory each, written beside and renamed, and verified when it is read. No pickle.

runs/NAME/checkpoints/step-000600/
    config.json             the model's configuration and the kind of its tokenizer
    model.safetensors       weights and running statistics, by our names; a tied head is stored once
    tokenizer.model         for the kinds that have a file
    optimizer.safetensors   "{parameter name}.{state name}" -> tensor
    trainer.json            what else the training loop wants back
    manifest.json           SHA-256 of each of these
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
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
from run import newest_run

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
    """Save all there is to know after `step` steps, and drop earlier checkpoints until `keep` are left.

    `trainer` is anything JSON can hold. A checkpoint of the same step is replaced. Raises OSError where the
    disk is full; what was there before is still there then.
    """
    checkpoints = run / "checkpoints"
    finished = checkpoints / f"step-{step:06d}"
    _clear(checkpoints)  # what a process left that was killed while it saved
    unfinished = checkpoints / f".{finished.name}-unfinished"
    unfinished.mkdir(parents=True)
    earlier = [path for path in list_checkpoints(run) if _step(path) < step]
    try:
        _write_files(unfinished, step, model, tokenizer, optimizers, trainer)
        if finished.exists():  # a folder cannot be renamed onto another
            _retire(finished)
        unfinished.rename(finished)
        for path in earlier[: max(0, len(earlier) - keep + 1)]:
            _retire(path)
        _sync(checkpoints)
    finally:
        _clear(checkpoints)
    return finished


def _write_files(
    folder: Path, step: int, model: Llama, tokenizer: Tokenizer, optimizers: list[Optimizer], trainer: dict
) -> None:
    config = {"model": dataclasses.asdict(model.config), "tokenizer": tokenizer.kind}
    (folder / CONFIG).write_text(json.dumps(config, indent=1))
    _save_tensors(_stored(model), folder / MODEL)
    tokenizer.save(folder)
    _save_tensors(_optimizer_state(model, optimizers), folder / OPTIMIZER)
    (folder / TRAINER).write_text(json.dumps({"step": step, "optimizers": _kinds(optimizers)} | trainer, indent=1))
    manifest = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*folder.iterdir(), folder):
        _sync(path)


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # its own name for what the disk refused
        raise OSError(f"{path} cannot be written: {error}") from None


def _retire(checkpoint: Path) -> None:
    """Take away its name at once: a process that is killed while it deletes must not leave half a checkpoint."""
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}-retired"))


def _clear(checkpoints: Path) -> None:
    """Delete what does not count as a checkpoint."""
    for leftover in checkpoints.glob(".step-*"):
        shutil.rmtree(leftover)


# --- finding ---------------------------------------------------------------------------------------------------------


def list_checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run, the earliest first."""
    found = [path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=_step)


def latest_checkpoint(run: Path) -> Path | None:
    """The last finished checkpoint of a run, or None where there is none yet."""
    return next(reversed(list_checkpoints(run)), None)


def find_checkpoint(where: str | None) -> Path:
    """`where` itself if it is a checkpoint, else the last one of the run `where`; for None, of the newest run.

    Raises ValueError if there is none.
    """
    where = where or str(newest_run())
    folder = Path(where)
    if (folder / MANIFEST).is_file():
        return folder
    last = latest_checkpoint(folder)
    if last is None:
        state = "holds no checkpoint" if folder.is_dir() else "is no folder"
        raise ValueError(f"{where} {state}; name a run that train.py made, or one of its checkpoints")
    return last


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


# --- reading ---------------------------------------------------------------------------------------------------------


def load_model(checkpoint: Path, device: torch.device | str) -> tuple[Llama, Tokenizer]:
    """The model of a checkpoint on `device`, ready to evaluate, and its tokenizer.

    Raises ValueError, naming the file, for one that is missing, damaged, or does not fit the others.
    """
    _verify(checkpoint, leave_out={OPTIMIZER, TRAINER})
    try:
        config = json.loads((checkpoint / CONFIG).read_text())
        with torch.device("meta"):
            model = Llama(ModelConfig(**config["model"]))
        tokenizer = load_tokenizer(config["tokenizer"], checkpoint)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{checkpoint / CONFIG} does not describe a model of this version: {error}") from None
    model.load_state_dict(_read_weights(checkpoint, model), assign=True)
    if model.config.tie_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.to(device).eval(), tokenizer


def load_training_state(checkpoint: Path, model: Llama, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Put weights and optimizer state back, bit for bit, and return the trainer's own part with its "step".

    Raises ValueError, naming the file, for one that is missing, damaged, or not of this model and these optimizers.
    """
    _verify(checkpoint)
    trainer = json.loads((checkpoint / TRAINER).read_text())
    if trainer["optimizers"] != _kinds(optimizers):
        there, here = ", ".join(trainer["optimizers"]), ", ".join(_kinds(optimizers))
        raise ValueError(f"{checkpoint / OPTIMIZER} is of another --optimizer: {there}, not {here}")
    model.load_state_dict(_read_weights(checkpoint, model))
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(checkpoint / OPTIMIZER).items():
        name, _, state = key.rpartition(".")
        # A copy: products of matrices round differently at other alignments, and a file's may be any.
        states.setdefault(name, {})[state] = tensor.clone()
    names = _parameter_names(model)
    for optimizer in optimizers:
        packed = optimizer.state_dict()
        parameters = (weight for group in optimizer.param_groups for weight in group["params"])
        packed["state"] = {index: states.pop(names[id(weight)], {}) for index, weight in enumerate(parameters)}
        packed["state"] = {index: state for index, state in packed["state"].items() if state}
        optimizer.load_state_dict(packed)
    assert not states, f"no optimizer updates {_some(states)}"
    return trainer


def _read_weights(checkpoint: Path, model: Llama) -> dict[str, Tensor]:
    """All of `model`'s state from the file. Raises ValueError, naming what differs, if it holds anything else."""
    path = checkpoint / MODEL
    found, expected = load_file(path), _stored(model)
    missing, unknown = expected.keys() - found.keys(), found.keys() - expected.keys()
    misshapen = {name for name in expected.keys() & found.keys() if expected[name].shape != found[name].shape}
    complaints = {"lacks": missing, "has an unknown": unknown, "has another shape of": misshapen}
    if any(complaints.values()):
        listed = "; ".join(f"{complaint} {_some(names)}" for complaint, names in complaints.items() if names)
        raise ValueError(f"{path} is of another model: it {listed}")
    if model.config.tie_embeddings:
        found["lm_head.weight"] = found["embed_tokens.weight"]
    return found


def _stored(model: Llama) -> dict[str, Tensor]:
    """What the file holds of a model: its state, but a tied head only as the embedding."""
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


# --- whole and unaltered ---------------------------------------------------------------------------------------------


def _verify(checkpoint: Path, leave_out: Collection[str] = ()) -> None:
    """Raise ValueError, naming the file, unless every file of the checkpoint is as it was written."""
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
            raise ValueError(f"{path} is damaged: its SHA-256 is not that of the manifest; use another checkpoint")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk and not only in memory."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _some(names: Iterable[str]) -> str:
    """The first few of `names`, for one line."""
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first


# --- Hugging Face's names --------------------------------------------------------------------------------------------

# Our names and Hugging Face's. The layouts agree: nothing is transposed or permuted.
HF_NAMES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "layers.{}.self_attn.q_proj.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.self_attn.k_proj.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.self_attn.v_proj.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.self_attn.o_proj.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.mlp.gate_proj.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.mlp.up_proj.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.mlp.down_proj.weight": "model.layers.{}.mlp.down_proj.weight",
    "finish.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
# The norms' names go by the placement; `post_attention_layernorm` is before the MLP in one and after attention in two.
HF_NORMS = {
    "pre": {  # Llama, Qwen 3, StableLM
        "attention_residual.norm.weight": "input_layernorm.weight",
        "mlp_residual.norm.weight": "post_attention_layernorm.weight",
    },
    "reordered": {  # OLMo 2
        "attention_residual.norm.weight": "post_attention_layernorm.weight",
        "mlp_residual.norm.weight": "post_feedforward_layernorm.weight",
    },
    "sandwich": {  # Gemma 2
        "attention_residual.norm.weight": "input_layernorm.weight",
        "attention_residual.norm_out.weight": "post_attention_layernorm.weight",
        "mlp_residual.norm.weight": "pre_feedforward_layernorm.weight",
        "mlp_residual.norm_out.weight": "post_feedforward_layernorm.weight",
    },
}


def hugging_face_name(ours: str) -> str:
    """Hugging Face's name of our weight. Raises ValueError if a Llama has none like it."""
    return _translate(ours, _names(ModelConfig()))


def from_hugging_face(state: Mapping[str, Tensor], config: ModelConfig | None = None) -> dict[str, Tensor]:
    """A Hugging Face model's state by our names, ready for `load_state_dict`; a head that is left out is tied.

    `config` is of the model that takes it, a Llama if left out. Raises ValueError for a name that such a model does
    not have.
    """
    theirs = {their_name: name for name, their_name in _names(config or ModelConfig()).items()}
    ours = {_translate(name, theirs): tensor for name, tensor in state.items()}
    return {"lm_head.weight": ours["embed_tokens.weight"]} | ours


def _names(config: ModelConfig) -> dict[str, str]:
    """The whole table for models like `config`. Raises ValueError if Hugging Face has none of that placement."""
    if config.placement not in HF_NORMS:
        raise ValueError(f"Hugging Face has no names for --placement {config.placement}; {', '.join(HF_NORMS)} have")
    names = HF_NAMES | {
        f"layers.{{}}.{ours}": f"model.layers.{{}}.{theirs}" for ours, theirs in HF_NORMS[config.placement].items()
    }
    if config.norm == "layernorm":
        norms = [name for name in names if "norm" in name or name == "finish.weight"]
        names |= {name.replace("weight", "bias"): names[name].replace("weight", "bias") for name in norms}
    if config.qk_norm != "none":
        inside = ".norm" if config.qk_norm == "full" else ""
        for part in ("q_norm", "k_norm"):
            path = f"layers.{{}}.self_attn.{part}"
            names[f"{path}{inside}.weight"] = f"model.{path}.weight"
    return names


def to_hugging_face(model: Llama) -> dict[str, Tensor]:
    """The state of a model by Hugging Face's names. Raises ValueError unless it is a Llama: pre-norm with RMSNorm."""
    config = model.config
    if (config.placement, config.norm, config.qk_norm) != ("pre", "rmsnorm", "none"):
        raise ValueError("Hugging Face's Llama is --placement pre --norm rmsnorm --qk-norm none, and this model is not")
    return {hugging_face_name(name): tensor for name, tensor in model.state_dict().items()}


def _translate(name: str, names: Mapping[str, str]) -> str:
    """Look up `name` with its layer's number, if it has one, left open."""
    layer = re.search(r"(?<=layers\.)\d+", name)
    pattern = name.replace(layer[0], "{}", 1) if layer else name
    if pattern not in names:
        raise ValueError(f"Llama has no weight {name!r}")
    return names[pattern].format(layer[0] if layer else "")
