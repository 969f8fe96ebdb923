"""Weights under Hugging Face's names. The layouts agree: nothing is transposed or permuted."""

import re

from config import ModelConfig

# Our names and theirs.
NAMES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "layers.{}.self_attn.q_proj.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.self_attn.k_proj.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.self_attn.v_proj.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.self_attn.o_proj.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.mlp.gate_proj.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.mlp.up_proj.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.mlp.down_proj.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.self_attn.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",  # Qwen 3, per head
    "layers.{}.self_attn.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.self_attn.q_norm.norm.weight": "model.layers.{}.self_attn.q_norm.weight",  # OLMo 2, over all heads
    "layers.{}.self_attn.k_norm.norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "finish.weight": "model.norm.weight",
    "finish.bias": "model.norm.bias",
    "lm_head.weight": "lm_head.weight",
}
# The norms' names depend on the placement: `post_attention_layernorm` comes before the MLP in one and after attention
# in two.
NORMS = {
    "pre": {  # Llama, Qwen 3, StableLM
        "attention_residual.norm": "input_layernorm",
        "mlp_residual.norm": "post_attention_layernorm",
    },
    "reordered": {  # OLMo 2
        "attention_residual.norm": "post_attention_layernorm",
        "mlp_residual.norm": "post_feedforward_layernorm",
    },
    "sandwich": {  # Gemma 2
        "attention_residual.norm": "input_layernorm",
        "attention_residual.norm_out": "post_attention_layernorm",
        "mlp_residual.norm": "pre_feedforward_layernorm",
        "mlp_residual.norm_out": "post_feedforward_layernorm",
    },
}


def hugging_face_name(ours: str, config: ModelConfig) -> str:
    """Hugging Face's name for a weight of a model like `config`, or ours where no architecture has such a weight."""
    layer = re.search(r"(?<=^layers\.)\d+", ours)
    number = layer[0] if layer else ""
    names = NAMES | {
        f"layers.{{}}.{norm}.{part}": f"model.layers.{{}}.{theirs}.{part}"
        for norm, theirs in NORMS.get(config.placement, {}).items()
        for part in ("weight", "bias")
    }
    pattern = ours.replace(f"layers.{number}.", "layers.{}.", 1)
    return names[pattern].format(number) if pattern in names else ours
