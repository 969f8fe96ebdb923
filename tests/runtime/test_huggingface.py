"""Names of weights: ours and Hugging Face's."""

import dataclasses

import pytest
import torch

from config import ModelConfig
from model import Llama
from runtime.huggingface import from_hugging_face, hugging_face_name, to_hugging_face

CONFIG = ModelConfig(dim=16, layers=2, heads=2, hidden_dim=24, context=8, vocab_size=257)


@pytest.mark.parametrize("tied", [True, False])
def test_names_go_there_and_back(tied):
    model = Llama(dataclasses.replace(CONFIG, layers=12, tie_embeddings=tied))
    theirs = to_hugging_face(model)
    assert theirs["model.layers.11.post_attention_layernorm.weight"] is not None
    assert theirs["model.norm.weight"].shape == (16,)
    back = from_hugging_face(theirs)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())
    if tied:
        del theirs["lm_head.weight"]
        assert torch.equal(from_hugging_face(theirs)["lm_head.weight"], model.embed_tokens.weight)


def test_what_no_llama_has_is_refused():
    assert hugging_face_name("layers.3.mlp_residual.norm.weight") == "model.layers.3.post_attention_layernorm.weight"
    for name in ("layers.0.attention_residual.norm.bias", "rope.cos", "layers.x.mlp.up_proj.weight"):
        with pytest.raises(ValueError, match="Llama has no weight"):
            hugging_face_name(name)
    for changes in ({"placement": "post"}, {"norm": "layernorm"}, {"qk_norm": "head"}):
        with pytest.raises(ValueError, match="--placement pre --norm rmsnorm"):
            to_hugging_face(Llama(ModelConfig(**dataclasses.asdict(CONFIG) | changes)))
