"""Weights under Hugging Face's names. The layouts agree: nothing is transposed or permuted."""

import re
from collections.abc import Mapping

from torch import Tensor

from config import ModelConfig
from model import Llama

# Our names and theirs.
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
# The norms' names depend on the placement: `post_attention_layernorm` comes before the MLP in one and after attention
# in two.
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
    """Hugging Face's name for a weight of ours. Raises ValueError if its Llama has no such weight."""
    return _translate(ours, _names(ModelConfig()))


def from_hugging_face(state: Mapping[str, Tensor], config: ModelConfig | None = None) -> dict[str, Tensor]:
    """A Hugging Face model's state under our names, for `load_state_dict`. A missing head is tied to the embedding.

    `config` is that of the model to load into (default: a Llama). Raises ValueError for a name that it does not have.
    """
    theirs = {their_name: name for name, their_name in _names(config or ModelConfig()).items()}
    ours = {_translate(name, theirs): tensor for name, tensor in state.items()}
    return {"lm_head.weight": ours["embed_tokens.weight"]} | ours


def _names(config: ModelConfig) -> dict[str, str]:
    """The table for models like `config`. Raises ValueError if Hugging Face has no model with that placement."""
    if config.placement not in HF_NORMS:
        raise ValueError(f"no Hugging Face model uses --placement {config.placement}; supported: {', '.join(HF_NORMS)}")
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
    """A model's state under Hugging Face's names. Raises ValueError unless it is a Llama: pre-norm with RMSNorm."""
    config = model.config
    if (config.placement, config.norm, config.qk_norm, config.scaled_embedding) != ("pre", "rmsnorm", "none", False):
        raise ValueError("Hugging Face's Llama is --placement pre --norm rmsnorm without --qk-norm, --scaled-embedding")
    return {hugging_face_name(name): tensor for name, tensor in model.state_dict().items()}


def _translate(name: str, names: Mapping[str, str]) -> str:
    """Look up `name` with its layer number, if any, replaced by {}."""
    layer = re.search(r"(?<=layers\.)\d+", name)
    pattern = name.replace(layer[0], "{}", 1) if layer else name
    if pattern not in names:
        raise ValueError(f"no weight named {name!r} in this architecture")
    return names[pattern].format(layer[0] if layer else "")
