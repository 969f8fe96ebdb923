"""The recipes of released models: norms, residual path, and what else surrounds them, as options of `ModelConfig`.

`--recipe NAME` asks for a row: its options come after those of the preset and before flags. A row never sets sizes, the
tokenizer, rates or steps, and names what differs from the defaults, which are LLaMA's. Models with the same recipe
share a row. Windows, experts, biases, partial rotary positions, layers without positions, eps and the order of casts
are not part of a recipe; multipliers that fold into weights are not either. docs/recipes.md has the sources.
"""

from typing import Any

QK_NORM = {"qk_norm": "head"}
QK_WITHOUT_GAIN = QK_NORM | {"qk_norm_args": {"elementwise_affine": False}}
LAYERNORM = {"norm": "layernorm"}
ZERO_CENTERED = {"norm_args": {"zero_centered": True}}
REORDERED = {"placement": "reordered"}
GEMMA = ZERO_CENTERED | {"embedding_scale": "sqrt", "activation": "gelu_tanh"}
CAPS = {"attention_cap": 50.0, "logit_cap": 30.0}
ELEMENT_GATE = {"attention_gate": "element"}
PLAIN_RELU2 = {"mlp": "plain", "activation": "relu2"}

ROWS: dict[str, dict[str, Any]] = {
    "llama mistral ministral3 qwen2 phi3 granite helium glm smollm3 seed_oss ernie4_5 solar_open": {},
    "qwen3 glm4_moe": QK_NORM,
    "minimax_m2": {"qk_norm": "full"},
    "hunyuan_v1_dense": QK_NORM | {"qk_norm_after_rope": True},
    "llama4": QK_WITHOUT_GAIN,
    "laguna": QK_NORM | {"attention_gate": "head", "gate_activation": "softplus"},
    "qwen3_next qwen3_5": ZERO_CENTERED | QK_NORM | ELEMENT_GATE,
    "step3p7": ZERO_CENTERED | QK_NORM | {"attention_gate": "head"},
    "gemma": GEMMA,
    "vaultgemma": GEMMA | CAPS,
    "gemma2": GEMMA | CAPS | {"placement": "sandwich"},
    "gemma3": GEMMA | QK_NORM | {"placement": "sandwich"},
    "gemma4": GEMMA | QK_NORM | {"placement": "sandwich", "norm_args": {}, "v_norm": True},
    "glm4": {"placement": "sandwich"},
    "afmoe": {"placement": "sandwich"} | QK_NORM | ELEMENT_GATE,
    "muse_glimmer": ZERO_CENTERED | QK_WITHOUT_GAIN | ELEMENT_GATE
    | {"placement": "sandwich", "embedding_norm": "plain", "logit_cap": 20.0},
    "olmo2 olmo3 olmo_hybrid": REORDERED | {"qk_norm": "full"},
    "exaone4": REORDERED | QK_NORM,
    "arcee": PLAIN_RELU2,
    "nanochat": PLAIN_RELU2 | QK_NORM
    | {"norm_args": {"elementwise_affine": False}, "embedding_norm": "plain", "logit_cap": 15.0},
    "bitnet": {"inner_norm": True, "activation": "relu2"},
    "olmo": LAYERNORM | {"norm_args": {"elementwise_affine": False}},
    "stablelm": LAYERNORM,
    "nemotron": LAYERNORM | ZERO_CENTERED | PLAIN_RELU2,
    "starcoder2": LAYERNORM | {"mlp": "plain", "activation": "gelu_tanh"},
    "cohere cohere2": LAYERNORM | {"norm_args": {"bias": False}, "placement": "parallel"},
    "minimax": {"placement": "minimax"},
    "deepseek_v4": {"placement": "mhc"},
    "glm5_next": {"placement": "mhc", "placement_args": {"end": "mean"}},
    "inkling2": {"placement": "attnres-block", "placement_args": {"layers": 6, "normalize_values": True}}
    | {"embedding_norm": "gain", "logit_cap": 30.0},
}  # fmt: skip
RECIPES = {name: options for names, options in ROWS.items() for name in names.split()}
