"""Checkpoints: saving is atomic, hashes are verified, and resuming is bit-identical."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import AdamW, Optimizer

from config import ModelConfig
from data.tokenizer import ByteTokenizer, train_tokenizer
from model import Llama
from runtime.checkpoint import (
    find_checkpoint,
    intact_checkpoint,
    list_checkpoints,
    load_pretrained,
    load_training_state,
    save_checkpoint,
    save_pretrained,
)

CONFIG = ModelConfig(dim=16, layers=2, heads=2, hidden_dim=24, context=8, vocab_size=257)
BATCHES = torch.randint(0, 257, (20, 2, 9), generator=torch.Generator().manual_seed(0))
FILES = ["config.json", "manifest.json", "model.safetensors", "optimizer.safetensors"]
FILES += ["tokenizer.json", "tokenizer_config.json", "trainer.json"]


def adamw(model: Llama) -> list[Optimizer]:
    return [AdamW([{"params": [weight]} for weight in model.parameters()], lr=1e-2, foreach=False, amsgrad=True)]


def muon(model: Llama) -> list[Optimizer]:
    matrices = [weight for weight in model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=1e-2), AdamW(others, lr=1e-2, fused=True)]


def train(model: Llama, optimizers: list[Optimizer], steps: range) -> None:
    model.train()
    for step in steps:
        model.loss(BATCHES[step][:, :-1], BATCHES[step][:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def save(run: Path, step: int = 3, keep: int = 2, model: Llama | None = None, **trainer: Any) -> Path:
    return save_checkpoint(run, step, model or Llama(CONFIG), ByteTokenizer(), [], trainer, keep)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def full_state(model: Llama, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    for number, optimizer in enumerate(optimizers):
        for index, values in optimizer.state_dict()["state"].items():
            state |= {f"{number} {index} {key}": tensor for key, tensor in values.items()}
    return state


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# --- saving and resuming ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_optimizers, tied", [(adamw, False), (muon, True)])
@pytest.mark.parametrize("stop", [0, 4])
def test_resumed_training_is_bit_identical(tmp_path, make_optimizers, tied, stop):
    config = dataclasses.replace(CONFIG, norm="batchnorm", tie_embeddings=tied)
    model = Llama(config, seed=1)
    optimizers = make_optimizers(model)
    train(model, optimizers, range(stop))
    save_checkpoint(tmp_path, stop, model, ByteTokenizer(), optimizers, {"seconds": 0.1 + 0.2}, 1)
    at_stop = {name: tensor.clone() for name, tensor in full_state(model, optimizers).items()}
    train(model, optimizers, range(stop, 7))

    resumed = Llama(config, seed=2)
    resumed_optimizers = make_optimizers(resumed)
    train(resumed, resumed_optimizers, range(10, 11))  # loading replaces this state
    resumed_optimizers[0].param_groups[0]["lr"] = 0.125
    trainer = load_training_state(list_checkpoints(tmp_path)[0], resumed, resumed_optimizers)
    assert trainer == {"step": stop, "seconds": 0.1 + 0.2}
    assert resumed_optimizers[0].param_groups[0]["lr"] == 0.125  # the schedule sets it
    resumed_optimizers[0].param_groups[0]["lr"] = 1e-2
    assert_same(full_state(resumed, resumed_optimizers), at_stop)
    train(resumed, resumed_optimizers, range(stop, 7))
    assert_same(full_state(resumed, resumed_optimizers), full_state(model, optimizers))


def test_checkpoint_contents(tmp_path):
    """The names of files and tensors are a contract."""
    config = dataclasses.replace(CONFIG, norm="batchnorm", layers=1)
    model = Llama(config)
    optimizers = adamw(model)
    train(model, optimizers, range(1))
    checkpoint = save_checkpoint(tmp_path, 600, model, ByteTokenizer(), optimizers, {"seconds": 2.5}, 1)
    assert checkpoint == tmp_path / "checkpoints/step-000600" and names(tmp_path) == ["step-000600"]
    assert sorted(path.name for path in checkpoint.iterdir()) == FILES
    assert len({path.stat().st_mode for path in checkpoint.iterdir()}) == 1  # that of the umask
    described = json.loads((checkpoint / "config.json").read_text())
    own = {"format": 1, "model": dataclasses.asdict(config), "tokenizer": "bytes", "imports": []}
    assert described["normal_llama"] == own
    assert described["model_type"] == "normal-llama" and "no architecture" in described["not_in_transformers"]
    assert json.loads((checkpoint / "trainer.json").read_text()) == {"step": 600, "seconds": 2.5}
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    matrices = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert set(load_file(checkpoint / "model.safetensors")) == {
        "model.embed_tokens.weight",  # and not the tied head
        *(f"model.layers.0.{name}.weight" for name in matrices),
        *(f"{norm}.{name}" for norm in norms for name in ("weight", "bias", "running_mean", "running_var")),
    }
    parameters = [name for name, _ in model.named_parameters()]
    assert load_file(checkpoint / "optimizer.safetensors").keys() == {
        f"{name}.{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    }


@pytest.mark.parametrize("tied", [True, False])
def test_loaded_model_equals_the_saved_model_in_eval_mode(tmp_path, tied):
    tokenizer = train_tokenizer(["def first(x):\n\treturn x\n" * 20], 300)
    model = Llama(dataclasses.replace(CONFIG, vocab_size=300, tie_embeddings=tied, norm="batchnorm", dropout=0.5))
    train(model, adamw(model), range(3))
    save_pretrained(tmp_path / "new", model, tokenizer)
    loaded, loaded_tokenizer = load_pretrained(str(tmp_path / "new"))
    assert not loaded.training and loaded.config == model.config
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == tied
    assert loaded_tokenizer.hash == tokenizer.hash and loaded_tokenizer.kind == "sentencepiece"
    with torch.no_grad():
        assert torch.equal(loaded(BATCHES[0, :, :8]), model.eval()(BATCHES[0, :, :8]))
    train(loaded, adamw(loaded), range(1))  # training can continue


def test_old_checkpoints_are_deleted_and_the_same_step_is_replaced(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=3)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000002", "step-000003", "step-000010"]
    again = save(tmp_path, 10, keep=3, note="again")
    assert "again" in (again / "trainer.json").read_text()
    save(tmp_path, 999_999, keep=1)
    assert names(tmp_path) == ["step-999999"]
    assert save(tmp_path, 1_000_000) == list_checkpoints(tmp_path)[-1]  # one more digit


def test_a_failed_save_keeps_existing_checkpoints(tmp_path, file_size_limit):
    earlier = save(tmp_path, 1, keep=1)
    for step, size in ((1, 500), (2, 500), (2, 10_000)):  # bytes; the weights need more space
        error = rf"step-00000{step} cannot be written: .* it needs [\d,]+ bytes"
        with file_size_limit(size), pytest.raises(OSError, match=error):
            save(tmp_path, step, keep=1)
    assert names(tmp_path) == ["step-000001"]
    load_pretrained(earlier)


def test_a_damaged_checkpoint_is_not_counted_among_those_to_keep(tmp_path):
    """Of a run that goes on from the one before it."""
    for step in (1, 2, 4):
        save(tmp_path, step)
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-000002", "step-000003", "step-000004"]


# --- damaged checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut off", "altered", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(tmp_path, name, damage, capsys):
    older, checkpoint = save(tmp_path, 1), save(tmp_path, 2)
    path, content = checkpoint / name, (checkpoint / name).read_bytes()
    middle = len(content) // 2
    altered = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[:-1] if damage == "cut off" else altered)
    assert intact_checkpoint(tmp_path) == older
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line and line.endswith("going back to step-000001")
    if name in ("optimizer.safetensors", "trainer.json"):
        assert find_checkpoint(checkpoint) == checkpoint  # a model alone does not need it
    else:
        with pytest.raises(ValueError, match=name):
            load_pretrained(checkpoint)  # never another one than the one that was named
    (older / "config.json").unlink()
    with pytest.raises(ValueError, match=rf"{name} .*no other checkpoint of .* is intact"):
        intact_checkpoint(tmp_path)


# --- from Python -----------------------------------------------------------------------------------------------------


def test_a_model_is_not_saved_over_something(tmp_path):
    """Neither over a checkpoint, which its manifest would call damaged, nor into a run, whose checkpoints it hides."""
    checkpoint = save(tmp_path / "run")
    for path in (checkpoint, tmp_path / "run"):
        with pytest.raises(ValueError, match="is not empty; name a new directory"):
            save_pretrained(path, Llama(CONFIG), ByteTokenizer())
    load_pretrained(checkpoint)


def test_find_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")
    with pytest.raises(ValueError, match=r"no run in runs/ yet; start one"):
        find_checkpoint(None)
    old, new = (save(runs / name, 1) for name in ("b-old", "a-new"))
    for number, run in enumerate((runs / "b-old", runs / "a-new"), 1):
        (run / "run.json").touch()
        os.utime(run / "run.json", (1000 * number, 1000 * number))
    find: Callable[[Any], Path] = find_checkpoint
    assert find(None) == new and find(str(runs / "b-old")) == find(runs / "b-old") == find(f"{old}/") == old
    later = save(runs / "b-old", 2)
    os.utime(runs / "b-old" / "run.json")
    assert find(None) == find(runs / "b-old") == later
    (runs / "z-empty").mkdir()
    for path in (runs / "z-empty", runs / "nowhere", later / "config.json"):
        with pytest.raises(ValueError, match=rf"^{path} .*; name a run, one of its checkpoints, or a Hugging Face"):
            find(str(path))
