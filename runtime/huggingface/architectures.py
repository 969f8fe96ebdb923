"""Configurations of Hugging Face's architectures and ours, both ways.

An architecture is a row in `ARCHITECTURES`. What it computes is its recipe; the row says how its configuration and
weights differ from Llama's. A field that is unknown and not null is refused: it may change what the model computes.
"""

import inspect
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from config import DEFAULTS, ROPE_SCALING, ModelConfig, combine
from files import Json, is_a, require, warn
from norms import KINDS
from recipes import RECIPES
from runtime.huggingface.weights import Layout

OWN_TYPE = "normal-llama"  # the model_type of a model that no architecture expresses
OWN = "normal_llama"  # the key of our configuration in config.json

SIZES = {  # theirs, ours
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "context",
}
# Fields where null is off, not the default.
NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor")
CARRIED = {  # fields of some architectures, and our options that say the same
    "partial_rotary_factor": "rotary_fraction",
    "attention_bias": "attention_bias",
    "attn_logit_softcapping": "attention_cap",
    "final_logit_softcapping": "logit_cap",
    "embedding_multiplier": "embedding_scale",
}
LAYER_TYPES = ("full_attention", "sliding_attention")
FOLDED: dict[str, tuple[Any, float, str]] = {  # multipliers: where they do nothing, their power, modules of ours
    "query_pre_attn_scalar": (lambda config: config.head_dim, -0.5, "q_proj"),
    "attention_multiplier": (lambda config: config.head_dim**-0.5, 1, "q_proj"),
    "residual_multiplier": (lambda config: 1.0, 1, "o_proj down_proj"),
    "logits_scaling": (lambda config: 1.0, -1, "final_norm"),
}
# Other fields that are read, and those that do not change the logits, such as settings of generation and what tools
# leave behind. `auto_map` names code, which is never run.
OTHERS = """
tie_word_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor normal_llama _name_or_path
architectures model_type transformers_version transformers.js_config dtype torch_dtype auto_map use_cache
initializer_range pretraining_tp is_llama_config tokenizer_class is_decoder layer_types max_sequence_length bos_token_id
eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id attn_implementation _attn_implementation
_attn_implementation_autoset cache_implementation gradient_checkpointing use_bfloat16 tf_legacy_loss return_dict
output_attentions output_hidden_states torchscript task_specific_params id2label label2id num_labels problem_type
finetuning_task do_sample temperature top_k top_p typical_p repetition_penalty max_length min_length early_stopping
num_beams num_beam_groups diversity_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_window_layers
sliding_window_pattern _sliding_window_pattern rope_local_base_freq no_rope_layer_interval
chunk_size_feed_forward pruned_heads is_encoder_decoder add_cross_attention
tie_encoder_decoder
"""


@dataclass(frozen=True)
class Architecture:
    """A causal language model of `transformers`. Its class is called NAMEForCausalLM.

    eps: its field for the norm's eps, or "" if that is fixed.
    defaults: its defaults for missing fields, if not those in COMMON; that of `eps` is 1e-5 otherwise.
    has: its fields in CARRIED and FOLDED.
    ours: our options besides those of the recipe.
    square: its head_dim is always hidden_size / num_attention_heads.
    window: "" if it has no sliding_window, "off" if that is not used, "null" if we compute null only; or the layers
        that have it: "all", or those of "layer_types"; with "layer_rope" they are refused, as they have another RoPE.
    names, interleaved: see `Layout`.
    """

    name: str
    eps: str = "rms_norm_eps"
    defaults: Json = field(default_factory=dict)
    has: tuple[str, ...] = ()
    ours: Json = field(default_factory=dict)
    square: bool = False
    window: str = ""
    names: dict[str, str] = field(default_factory=dict)
    interleaved: bool = False


ALSO_CARRIED = ("eps", "cast_order")  # arguments of a norm; the order of casts changes rounding only
NORM_DEFAULTS = {"elementwise_affine": True, "bias": True, "zero_centered": False, "eps": 1e-5}
# Fields that we compute at one value only, of any architecture, or of some that have this default.
COMMON: Json = {"is_causal": True, "partial_rotary_factor": 1.0}
COMMON |= dict.fromkeys(["clip_qkv", "attn_logit_softcapping", "quantization_config"])
COMMON |= dict.fromkeys(["hidden_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"], 0.0)
COMMON |= dict.fromkeys(["attention_out_bias", "mlp_bias", "use_bias", "use_qkv_bias"], False)
COMMON |= dict.fromkeys(["qk_layernorm", "use_parallel_residual", "rope_interleaved", "use_sliding_window"], False)
COMMON |= {"use_bidirectional_attention": False}
THEIR_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}

SMALL_EPS, TIED, SLIDING = {"rms_norm_eps": 1e-6}, {"tie_word_embeddings": True}, {"sliding_window": 4096}
OF_GEMMA = SMALL_EPS | TIED | SLIDING | {"query_pre_attn_scalar": 256}
OF_GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}

ARCHITECTURES = {
    "llama": Architecture("Llama", defaults=SMALL_EPS),
    "qwen3": Architecture("Qwen3", defaults=SMALL_EPS | {"head_dim": 128}, window="off"),
    "olmo": Architecture("Olmo", eps="", ours={"norm_args": {"eps": 1e-5}}),
    "olmo2": Architecture("Olmo2"),
    "stablelm": Architecture(
        "StableLm", eps="layer_norm_eps", defaults={"partial_rotary_factor": 0.25},
        has=("partial_rotary_factor",), square=True, ours={"norm_args": {"elementwise_affine": True, "bias": True}},
    ),
    "granite": Architecture(
        "Granite", defaults=SMALL_EPS | {"attention_multiplier": 1.0},
        has=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    ),
    "gemma": Architecture("Gemma", defaults=SMALL_EPS | TIED),
    "gemma2": Architecture(
        "Gemma2", defaults=OF_GEMMA | OF_GEMMA2, has=("query_pre_attn_scalar", *OF_GEMMA2), window="layer_types",
    ),
    "gemma3_text": Architecture(
        "Gemma3", defaults=OF_GEMMA | {"rope_theta": 1e6},
        has=("query_pre_attn_scalar", "final_logit_softcapping"), window="layer_rope",
    ),
    # With a window, other layers have no positions.
    "exaone4": Architecture("Exaone4", defaults=SLIDING, window="null"),
    "glm4": Architecture(
        "Glm4", has=("partial_rotary_factor", "attention_bias"),
        defaults={"rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5},
        names=FUSED | {
            "post_attention_layernorm": "post_self_attn_layernorm", "post_feedforward_layernorm": "post_mlp_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
        },
        interleaved=True,
    ),
    "arcee": Architecture("Arcee"),
    "qwen2": Architecture(  # without a field for its biases
        "Qwen2", defaults=SMALL_EPS, ours={"attention_bias": True}, window="off",
    ),
    # What these compute is also a Llama or OLMo 2, and is saved as that unless it was read as one of these.
    "mistral": Architecture("Mistral", defaults=SMALL_EPS | SLIDING, window="all"),
    "helium": Architecture("Helium", square=True, interleaved=True, defaults={"rms_norm_eps": 1e-8, "rope_theta": 1e5}),
    "ernie4_5": Architecture("Ernie4_5", defaults=TIED | {"rope_theta": 5e5}, interleaved=True),
    "smollm3": Architecture(
        "SmolLM3", defaults=SMALL_EPS | TIED | {"rope_theta": 2e6, "no_rope_layers": "missing"}, window="off",
    ),
    "seed_oss": Architecture("SeedOss", defaults=SMALL_EPS | {"attention_bias": True}, has=("attention_bias",)),
    "phi3": Architecture(
        "Phi3", ours={"rope_scaling": {}}, window="all",
        has=("partial_rotary_factor", "original_max_position_embeddings"),  # the second is of other types of RoPE
        names=FUSED | {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"},
    ),
    "olmo3": Architecture("Olmo3", defaults=SLIDING | {"rope_theta": 5e5}, window="layer_rope"),
}  # fmt: skip


def _ours(model_type: str) -> Json:
    recipe = RECIPES[model_type.removesuffix("_text")]
    return combine({"norm_args": {"elementwise_affine": True}}, recipe, ARCHITECTURES[model_type].ours)


def _fixed(model_type: str, config: ModelConfig) -> Json:
    """The fields that we compute at one value only, besides those in COMMON."""
    architecture, activation = ARCHITECTURES[model_type], THEIR_ACTIVATIONS[config.activation]
    fixed = {"attention_bias": config.attention_bias, "attention_dropout": 0.0, "hidden_act": activation}
    fixed |= {"hidden_activation": activation} if model_type.startswith("gemma") else {}
    fixed |= {"no_rope_layers": [1] * config.layers} if model_type == "smollm3" else {}
    if architecture.window == "null":
        fixed |= {"sliding_window": None, "layer_types": ["full_attention"] * config.layers}
    return {name: value for name, value in fixed.items() if name not in architecture.has}


def _differences(config: ModelConfig, model_type: str) -> list[str]:
    """What is not as the architecture has it. An option or argument of a norm that it does not name has its default."""
    architecture = ARCHITECTURES[model_type]
    recipe = _ours(model_type)
    theirs = {each.name: DEFAULTS[each.name] for each in fields(ModelConfig) if each.metadata["export"] == "computed"}
    arguments = inspect.signature(KINDS[config.norm]).parameters
    theirs |= {name: arguments[name].default for name in config.norm_args if name not in ALSO_CARRIED}
    theirs |= recipe | recipe["norm_args"]
    if theirs["embedding_scale"] == "sqrt":
        theirs["embedding_scale"] = math.sqrt(config.dim)
    if config.dim % config.heads or architecture.square:
        theirs["head_dim"] = config.dim / config.heads
    carried = {"norm_args", *(CARRIED[name] for name in CARRIED.keys() & architecture.has)}
    ours = NORM_DEFAULTS | vars(config) | config.norm_args
    differs = [name for name, value in theirs.items() if ours[name] != value and name not in carried]
    return [f"{name} {theirs[name]}, not {ours[name]}" for name in differs]


def _nearest(config: ModelConfig) -> str:
    names = sorted(ARCHITECTURES, key=lambda name: name != config.model_type)  # --init-from's comes first
    return min(names, key=lambda name: len(_differences(config, name)))


def to_theirs(config: ModelConfig) -> Json:
    """The fields of Hugging Face's configuration that say what the model computes. Raises ValueError if none can."""
    nearest = _nearest(config)
    architecture = ARCHITECTURES[nearest]
    differences = _differences(config, nearest)
    reason = f"{architecture.name}, the nearest, has {', '.join(differences)}"
    require(not differences, f"no Hugging Face architecture computes this: {reason}")
    theirs: Json = {"model_type": nearest, "architectures": [f"{architecture.name}ForCausalLM"]}
    theirs |= {name: getattr(config, ours) for name, ours in SIZES.items()}
    theirs["max_position_embeddings"] = longest = max(config.context, config.trained_context or 0)
    theirs |= {"tie_word_embeddings": config.tie_embeddings, "rope_theta": config.rope_theta}
    if architecture.eps:
        theirs[architecture.eps] = config.norm_args.get("eps", 1e-6 if config.norm == "rmsnorm" else 1e-5)
    for name in CARRIED.keys() & architecture.has:
        value = getattr(config, CARRIED[name])
        theirs[name] = None if name in NULLABLE and not value else value
    theirs |= {name: FOLDED[name][0](config) for name in FOLDED.keys() & architecture.has}
    rope: Json = {"rope_type": "llama3"} | config.rope_scaling if config.rope_scaling else {}
    if rope and rope["original_max_position_embeddings"] % 1 == 0:  # transformers asks for an integer
        rope["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    theirs["rope_scaling"] = rope or None  # the spelling of transformers 4, which 5 reads too
    if architecture.window.startswith("layer"):  # null is an error by layer, although none has the window
        theirs |= {"layer_types": ["full_attention"] * config.layers, "sliding_window": longest}
    elif architecture.window == "all":
        theirs["sliding_window"] = None
    return theirs | _fixed(nearest, config)


def from_theirs(theirs: Json) -> ModelConfig:
    """Our configuration for one of Hugging Face's. Raises ValueError, naming the field, for what we do not compute."""
    model_type = theirs.get("model_type", "")
    require(model_type in ARCHITECTURES, f"model_type {model_type!r} is not supported; {', '.join(ARCHITECTURES)} are")
    architecture = ARCHITECTURES[model_type]
    names = theirs.get("architectures")
    expected = [f"{architecture.name}ForCausalLM"]
    require(names in (None, expected), f"architectures must be {expected}, not {names!r}")
    theirs = _with_defaults(theirs)
    for name, ours in SIZES.items():
        require(name in theirs or ours in ("hidden_dim", "kv_heads", "head_dim"), f"{name} is missing")
    given = _ours(model_type)
    given |= {ours: theirs.get(name) for name, ours in SIZES.items()}
    if architecture.eps:
        given["norm_args"] |= {"eps": _number(theirs, architecture.eps, 1e-5)}
    types = theirs.get("layer_types") or LAYER_TYPES[: 2 if architecture.window.startswith("layer") else 1]
    others = set(types) - set(LAYER_TYPES[: 2 if architecture.window == "layer_types" else 1])
    require(not others, f"layer_types {sorted(others)} is not supported, only 'full_attention'")
    theirs |= _rope(theirs)
    for name in CARRIED.keys() & architecture.has:
        usual = DEFAULTS[CARRIED[name]]
        given[CARRIED[name]] = value = theirs.get(name, usual)
        require(is_a(value, type(usual)), f"{name} must be of type {type(usual).__name__}, not {value!r}")
    given |= {"rope_theta": theirs["rope_theta"], "rope_scaling": theirs["rope_scaling"]}
    config = ModelConfig(**given, tie_embeddings=theirs.get("tie_word_embeddings", False))
    window, windowed = theirs.get("sliding_window"), architecture.window == "all" or LAYER_TYPES[1] in types
    whole = window is None or (is_a(window, int) and window >= config.context)
    require(whole or not windowed, f"sliding_window {window!r} is not supported; null and {config.context} or more are")
    for name in FOLDED.keys() & architecture.has:
        require(_number(theirs, name, 1.0) > 0, f"{name} must be positive, not {theirs.get(name)!r}")
    fixed = {name: value for name, value in COMMON.items() if name not in architecture.has}
    fixed |= _fixed(model_type, config)
    for name, value in fixed.items():
        actual = theirs.get(name, value)
        if name.endswith("_dropout") and _number(theirs, name, value) > 0:
            warn(f"{name} {actual} is not used: --dropout is that of training")
        else:
            require(actual == value, f"{name} {actual!r} is not supported, only {value!r}")
    known = {*SIZES, *OTHERS.split(), *fixed, *architecture.has, architecture.eps}
    known |= {"sliding_window"} if architecture.window else set()
    for name in (name for name in theirs.keys() - known if not name.startswith("unsloth_")):
        raise ValueError(f"{name!r} is not a known field of {architecture.name}, and may change what it computes")
    differences = _differences(config, model_type)
    require(not differences, f"{architecture.name} has {', '.join(differences)}")
    return config if _nearest(config) == model_type else replace(config, model_type=model_type)


def layout(theirs: Json, config: ModelConfig) -> Layout:
    """How the weights of `config` are stored beside the configuration `theirs`."""
    model_type = theirs["model_type"]
    factors: dict[str, float] = {}
    if model_type == OWN_TYPE:
        return Layout(config)
    architecture = ARCHITECTURES[model_type]
    for name in FOLDED.keys() & architecture.has:
        neutral, power, modules = FOLDED[name]
        if config.qk_norm != "none":  # It would undo a factor of the matrix.
            modules = modules.replace("q_proj", "q_norm")
        factor = (_number(_with_defaults(theirs), name, 1.0) / neutral(config)) ** power
        factors |= dict.fromkeys(modules.split(), factor)
    return Layout(config, architecture.names, architecture.interleaved, factors)


def _with_defaults(theirs: Json) -> Json:
    """Without fields that are null, and with the architecture's defaults for missing ones."""
    model_type = theirs["model_type"]
    off = theirs.keys() & NULLABLE
    defaults = {name: value for name, value in ARCHITECTURES[model_type].defaults.items() if name not in off}
    theirs = defaults | {name: value for name, value in theirs.items() if value is not None or name == "is_causal"}
    for name, same in [("swish", "silu")] + [("gelu", "gelu_pytorch_tanh")] * (model_type == "gemma"):
        if theirs.get("hidden_act") == name:  # two names of one function
            theirs["hidden_act"] = same
    return theirs


def _rope(theirs: Json) -> Json:
    """The fields of the rotary positions as our configuration has them, from the spelling of transformers 4 or 5."""
    rope, parameters = theirs.get("rope_scaling") or {}, theirs.get("rope_parameters") or {}
    if ARCHITECTURES[theirs["model_type"]].window == "layer_rope":  # transformers merges both, by layer type
        rope = {"rope_type": "default"} | (parameters.get("full_attention") or {}) | rope
    rope = {name: value for name, value in (rope or parameters).items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if (kind, rope.get("factor")) == ("linear", 1):  # a factor of 1 changes nothing
        kind, _ = "default", rope.pop("factor")
    require(kind in ("default", "llama3"), f"RoPE of type {kind!r} is not supported; default and llama3 are")
    names = ROPE_SCALING if kind == "llama3" else ()
    for name in rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *names}:
        raise ValueError(f"RoPE has {name!r}, which is not supported with type {kind!r}")
    given = {"original_max_position_embeddings": theirs["max_position_embeddings"]} | theirs | rope
    return {
        "rope_scaling": {name: _number(given, name, None) for name in names},
        "rope_theta": _number(given, "rope_theta", 10000.0),
        "partial_rotary_factor": _number(given, "partial_rotary_factor", 1.0),
    }


def _number(given: Json, name: str, default: float | None) -> float:
    value: Any = default if given.get(name) is None else given[name]
    require(is_a(value, float) and math.isfinite(value), f"{name} must be a number, not {value!r}")
    return float(value)
