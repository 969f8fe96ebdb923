"""Conversion between our state_dict keys and Hugging Face's."""

import dataclasses

import pytest
import torch

from config import ModelConfig
from model import Llama
from runtime.huggingface import from_hugging_face, hugging_face_name, to_hugging_face

CONFIG = ModelConfig(dim=16, layers=2, heads=2, hidden_dim=24, context=8, vocab_size=257)


@pytest.mark.parametrize("tied", [True, False])
def test_export_and_import_round_trip(tied):
    model = Llama(dataclasses.replace(CONFIG, layers=12, tie_embeddings=tied))
    exported = to_hugging_face(model)
    assert exported["model.layers.11.post_attention_layernorm.weight"] is not None
    assert exported["model.norm.weight"].shape == (16,)
    imported = from_hugging_face(exported)
    assert imported.keys() == model.state_dict().keys()
    assert all(torch.equal(imported[name], tensor) for name, tensor in model.state_dict().items())
    if tied:
        del exported["lm_head.weight"]
        assert torch.equal(from_hugging_face(exported)["lm_head.weight"], model.embed_tokens.weight)


def test_names_and_models_that_are_not_llama_are_refused():
    assert hugging_face_name("layers.3.mlp_residual.norm.weight") == "model.layers.3.post_attention_layernorm.weight"
    for name in ("layers.0.attention_residual.norm.bias", "rope.cos", "layers.x.mlp.up_proj.weight"):
        with pytest.raises(ValueError, match=r"no weight named .* in this architecture"):
            hugging_face_name(name)
    for changes in ({"placement": "post"}, {"norm": "layernorm"}, {"qk_norm": "head"}):
        with pytest.raises(ValueError, match="--placement pre --norm rmsnorm"):
            to_hugging_face(Llama(ModelConfig(**dataclasses.asdict(CONFIG) | changes)))
