"""Checkpoints: what is in them, which are kept, and which is found when one is damaged."""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW, Optimizer

from config import ModelConfig
from data.tokenizer import ByteTokenizer
from files import digest
from model import Llama
from runtime.checkpoint import (
    find_checkpoint,
    intact_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_pretrained,
    save_checkpoint,
    save_pretrained,
)

CONFIG = ModelConfig(dim=16, layers=2, heads=2, hidden_dim=24, context=8, vocab_size=257)
FILES = ["config.json", "manifest.json", "model.safetensors", "optimizer.safetensors"]
FILES += ["tokenizer.json", "tokenizer_config.json", "trainer.json"]


def save(run: Path, step: int = 3, keep: int = 2, model: Llama | None = None, **trainer: Any) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    return save_checkpoint(run, step, model or Llama(CONFIG), ByteTokenizer(), [], trainer, keep)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_checkpoint_contents(tmp_path):
    """The names of files and tensors are a contract."""
    config = dataclasses.replace(CONFIG, norm="batchnorm", layers=1)
    model = Llama(config)
    optimizer = AdamW([{"params": [weight]} for weight in model.parameters()], amsgrad=True)
    model.loss(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()
    optimizer.step()
    checkpoint = save_checkpoint(tmp_path, 600, model, ByteTokenizer(), [optimizer], {"seconds": 2.5}, 1)
    assert checkpoint == tmp_path / "checkpoints/step-000600" and names(tmp_path) == ["step-000600"]
    assert sorted(path.name for path in checkpoint.iterdir()) == FILES
    assert len({path.stat().st_mode for path in checkpoint.iterdir()}) == 1  # the umask's mode
    described = json.loads((checkpoint / "config.json").read_text())
    own = {"format": 1, "model": dataclasses.asdict(config), "tokenizer": "bytes", "imports": []}
    checksum = described["normal_llama"].pop("sha256")
    assert described["normal_llama"] == own and checksum == digest(described)
    assert described["model_type"] == "normal-llama" and "no Hugging Face" in described["not_in_transformers"]
    assert json.loads((checkpoint / "trainer.json").read_text()) == {"step": 600, "numbers": {}, "seconds": 2.5}
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    matrices = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert set(load_file(checkpoint / "model.safetensors")) == {
        "model.embed_tokens.weight",  # and not the tied head
        *(f"model.layers.0.{name}.weight" for name in matrices),
        *(f"{norm}.{name}" for norm in norms for name in ("weight", "bias", "running_mean", "running_var")),
    }
    keys = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    expected = {f"{name}.{key}" for name, _ in model.named_parameters() for key in keys}
    assert load_file(checkpoint / "optimizer.safetensors").keys() == expected


def test_numbers_of_optimizers_come_back(tmp_path):
    models = [Llama(CONFIG, seed) for seed in range(2)]
    optimizers: list[Optimizer] = [AdamW(model.parameters()) for model in models]
    optimizers[0].state[models[0].embed_tokens.weight] |= {"scale": 0.1 + 0.2, "steps": 7, "mean": torch.ones(3)}
    checkpoint = save_checkpoint(tmp_path, 3, models[0], ByteTokenizer(), optimizers[:1], {"seconds": 1.5}, 1)
    load_checkpoint(checkpoint, models[1], optimizers[1:])
    state = optimizers[1].state[models[1].embed_tokens.weight]
    assert state.pop("mean").equal(torch.ones(3)) and state == {"scale": 0.1 + 0.2, "steps": 7}


def test_old_checkpoints_are_deleted_and_the_same_step_is_replaced(tmp_path):
    for step in (1, 2, 3, 999_999):
        save(tmp_path, step, keep=3)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000002", "step-000003", "step-999999"]
    again = save(tmp_path, 999_999, keep=3, note="again")
    assert "again" in (again / "trainer.json").read_text()
    assert save(tmp_path, 1_000_000, keep=2) == list_checkpoints(tmp_path)[-1]  # one more digit
    save(tmp_path, 11, keep=1)  # of a run that has gone back, because those after it are damaged
    assert names(tmp_path) == ["step-000011", "step-1000000", "step-999999"]


@pytest.mark.parametrize("damage", ["altered", "gone", "{}"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(tmp_path, name, damage, capsys):
    older, checkpoint = save(tmp_path, 1), save(tmp_path, 2)
    path, content = checkpoint / name, (checkpoint / name).read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(b"{}" if damage == "{}" else content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
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


def replace(owner: Any, weight: torch.Tensor, name: str = "weight") -> None:
    setattr(owner, name, nn.Parameter(weight.detach()))


SPOILT: dict[str, Callable[[Any], Any]] = {
    "lm_head.weight is no longer .*; call tie_weights": lambda m: replace(m.embed_tokens, m.lm_head.weight),
    r"norm\.weight and \S+\.weight are the same": lambda m: replace(m.final_norm, m.layers[0].mlp_residual.norm.weight),
    r"unknown model\.layers\.0\.mlp\.up_proj\.bias": lambda m: replace(m.layers[0].mlp.up_proj, torch.ones(24), "bias"),
    r"lacks model\.norm\.weight": lambda m: setattr(m, "final_norm", nn.Identity()),
    r"model\.norm\.weight has values that are NaN": lambda m: replace(m.final_norm, torch.ones(16) / 0),
    r"has a dtype other than F32, BF16, F16 for model\.embed_tokens": lambda m: m.double(),
}


@pytest.mark.parametrize("message", SPOILT)
def test_what_could_not_be_loaded_as_it_is_is_not_saved(tmp_path, message):
    model = Llama(CONFIG)
    SPOILT[message](model)
    with pytest.raises(ValueError, match=message) as error:
        save_pretrained(tmp_path / "new", model, ByteTokenizer())
    assert not re.search(r"\n|/\.", str(error.value)) and not list((tmp_path / "new").glob("*"))


def test_a_directory_is_saved_whole_or_not_at_all(tmp_path, monkeypatch, one_rank):
    """Not over a checkpoint, which its manifest would call damaged. Tensors need not be contiguous."""
    model, directory = Llama(CONFIG), tmp_path / "new"
    replace(model.embed_tokens, model.embed_tokens.weight.T.contiguous().T)
    model.tie_weights()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ByteTokenizer, "save", Mock(side_effect=KeyboardInterrupt))
        save_pretrained(directory, model, ByteTokenizer())
    assert not list(directory.iterdir())
    save_pretrained(str(directory), model, ByteTokenizer())
    loaded = load_pretrained(directory)[0].state_dict()  # a product of a transposed matrix may round differently
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="is not empty; name a new directory"):
        save_pretrained(directory, model, ByteTokenizer())
    for wrap in (torch.compile, torch.optim.swa_utils.AveragedModel, nn.parallel.DistributedDataParallel):
        save_pretrained(tmp_path / wrap.__name__, wrap(model), ByteTokenizer())
        for path in directory.iterdir():
            assert (tmp_path / wrap.__name__ / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="only a Llama can be saved, not a Sequential"):
        save_pretrained(tmp_path / "more", nn.Sequential(model), ByteTokenizer())


def test_find_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no run in runs/ yet; start one"):
        find_checkpoint(None)
    old, new = (save(Path("runs", name), 1) for name in ("b-old", "a-new"))
    for number, run in enumerate(("runs/b-old", "runs/a-new"), 1):
        Path(run, "run.json").touch()
        os.utime(Path(run, "run.json"), (1000 * number, 1000 * number))
    assert find_checkpoint(None) == new and find_checkpoint("runs/b-old") == find_checkpoint(f"{old}/") == old
    for path in ("runs", "nowhere", old / "config.json"):
        with pytest.raises(ValueError, match=rf"^{path} .*; name a run, one of its checkpoints, or a Hugging Face"):
            find_checkpoint(path)
