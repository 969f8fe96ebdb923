"""Weights under Hugging Face's names. The layouts agree: nothing is transposed or permuted."""

from config import ModelConfig

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
    """Hugging Face's name for a weight of a model like `config`. Weights that no architecture has get "model." too."""
    for path, theirs in NORMS.get(config.placement, {}).items():
        ours = ours.replace(f".{path}.", f".{theirs}.")
    ours = ours.replace("_norm.norm.", "_norm.")  # --qk-norm full: a norm inside the module that joins the heads
    ours = ours.replace("final_norm.", "norm.", 1) if ours.startswith("final_norm.") else ours
    return ours if ours.startswith("lm_head.") else f"model.{ours}"
