"""What config.json says of an edited model: the name of an architecture only where that computes the same."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from config import DEFAULTS, ModelConfig, option
from data.tokenizer import ByteTokenizer
from machine.distributed import full_tensor
from model import Attention, Linear, Llama
from roles import ROLES, Role
from runtime.huggingface.directory import stored_state, write_model
from runtime.parallel import shard_weights

SIZES: dict[str, Any] = dict(dim=16, layers=2, heads=2, hidden_dim=24, context=16, vocab_size=257)


def described(model: Llama, folder: Path) -> str:
    """The model_type, or why no architecture has the model."""
    state = {name: full_tensor(tensor) for name, tensor in stored_state(model).items()}
    write_model(folder, model, state, ByteTokenizer())
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"] == "normal-llama") == ("not_in_transformers" in config)
    return config.get("not_in_transformers", config["model_type"])


@pytest.mark.parametrize("declared, value", [({}, 0.0), ({}, 3.0), ({"export": "training"}, 3.0)])
def test_a_new_field_has_no_architecture_unless_at_its_default(declared, value, monkeypatch, tmp_path):
    """A field for training only does not count."""
    new = [("softcap", float, option(0.0, "a cap", **declared))]
    copied: Any = dataclasses.make_dataclass("ModelConfig", new, bases=(ModelConfig,), frozen=True)
    monkeypatch.setattr("runtime.huggingface.architectures.ModelConfig", copied)
    monkeypatch.setitem(DEFAULTS, "softcap", 0.0)
    nearest = "Llama, the nearest, has softcap 0.0, not 3.0"
    expected = nearest if value and not declared else "llama"
    assert described(Llama(copied(**SIZES, softcap=value)), tmp_path).endswith(expected)


class Capped(Llama):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x).tanh()


EDITS: dict[str, Callable[[Any], Any]] = {  # by the module that they change
    "final_norm": lambda model: setattr(model, "final_norm", nn.Identity()),
    "layers.0.self_attn": lambda model: setattr(model.layers[0].self_attn, "forward", lambda x, *arguments: x),
    "layers.1.mlp_residual.norm": lambda model: setattr(model.layers[1].mlp_residual.norm, "eps", 0.1),
    "layers.0.mlp_residual.norm": lambda model: setattr(model.layers[0].mlp_residual.norm, "zero_centered", True),
    "layers.1.self_attn": lambda model: setattr(model.layers[1].self_attn, "group", 2),
    "rope": lambda model: setattr(model.rope, "make_table", lambda: None),
    "layers.0.mlp.extra": lambda model: setattr(model.layers[0].mlp, "extra", nn.ReLU()),
    "the model": lambda model: setattr(model, "logits", lambda x: model.lm_head(x).tanh()),
}


@pytest.mark.parametrize("edited", EDITS)
def test_an_edited_model_has_no_architecture(edited, tmp_path):
    EDITS[edited](model := Llama(**SIZES))
    assert described(model, tmp_path) == f"{edited} is not as model.py makes it"


def test_a_weight_that_model_py_has_and_no_architecture(monkeypatch, tmp_path):
    class Gated(Attention):
        def __init__(self, config: ModelConfig):
            super().__init__(config)
            self.gate = Linear(config.dim, config.dim, role="extra_gate")

    monkeypatch.setattr("model.Attention", Gated)
    monkeypatch.setattr("roles.ROLES", [*ROLES, Role("extra_gate")])
    expected = "no Hugging Face architecture has model.layers.0.self_attn.gate.weight"
    assert described(Llama(**SIZES), tmp_path) == expected


def test_what_training_needs_and_sharded_weights_leave_the_architecture(tmp_path, one_rank):
    """Sharding swaps the classes of modules and replaces methods."""
    training: dict[str, Any] = {"dropout": 0.2, "init": "xavier", "depth_scaled_init": True}
    assert described(Llama(**SIZES, **training), tmp_path) == "llama"
    for kind, expected in ((Llama, "llama"), (Capped, "the model is not as model.py makes it")):
        shard_weights(model := kind(**SIZES), torch.device("cpu"))
        assert type(model) is not kind and described(model, tmp_path) == expected
