"""Configurations of Hugging Face's architectures and ours, both ways.

An architecture is a row in `ARCHITECTURES`: what our settings must be for it, and its own fields that we compute at one
value only. A field that is not known here is refused by its name, whatever its value: it may change what the model
computes.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from config import MAX_SIZE, ROPE_SCALING, ModelConfig
from files import is_a, require, warn
from norms import KINDS

Fields = dict[str, Any]  # a configuration, or a part of one

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
OPTIONAL = ("num_key_value_heads", "head_dim")  # a missing one follows from the others
# Other fields that are read, and those that do not change the logits, such as settings of generation and what tools
# leave behind. `auto_map` names code, which is never run.
OTHERS = """
tie_word_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor normal_llama
_name_or_path architectures model_type transformers_version transformers.js_config dtype torch_dtype auto_map
use_cache initializer_range pretraining_tp is_llama_config tokenizer_class is_decoder layer_types max_sequence_length
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
attn_implementation _attn_implementation _attn_implementation_autoset cache_implementation
gradient_checkpointing use_bfloat16 tf_legacy_loss
return_dict output_attentions output_hidden_states torchscript task_specific_params
id2label label2id num_labels problem_type finetuning_task
do_sample temperature top_k top_p typical_p repetition_penalty max_length min_length early_stopping num_beams
num_beam_groups diversity_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""


@dataclass(frozen=True)
class Architecture:
    """A causal language model of `transformers`.

    ours: the fields of ModelConfig, and the arguments of the norm, that it fixes.
    eps: its field for the norm's eps, or "" if that is fixed.
    fixed: its fields that we compute at one value only, which is also their default.
    defaults: its other defaults for missing fields; that of `eps` is 1e-5 otherwise.
    unused: its fields that do nothing at the fixed values.
    carries: options of ours, besides sizes and rotary positions, that its configuration has at any value.
    """

    name: str
    ours: Fields
    norm_args: Fields
    fixed: Callable[[ModelConfig], Fields]
    eps: str = "rms_norm_eps"
    defaults: Fields = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    carries: tuple[str, ...] = ()


PRE = {"placement": "pre", "norm": "rmsnorm", "qk_norm": "none"}
RMSNORM = {"elementwise_affine": True}
NORM_DEFAULTS = {"elementwise_affine": True, "bias": True, "eps": 1e-5}
# Fields of any architecture, which `transformers` writes only if they are not at these defaults, or in a full dump.
COMMON: Fields = {"is_causal": True, "rope_interleaved": False, "quantization_config": None}
COMMON |= {"is_encoder_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False}
COMMON |= {"chunk_size_feed_forward": 0, "pruned_heads": {}}
USUAL = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"}

ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", PRE, RMSNORM,
        lambda config: USUAL | {"mlp_bias": False},
        defaults={"rms_norm_eps": 1e-6},
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", PRE | {"qk_norm": "head"}, RMSNORM,
        lambda config: USUAL | {"use_sliding_window": False},
        defaults={"rms_norm_eps": 1e-6, "head_dim": 128},
        unused=("sliding_window", "max_window_layers"),
    ),
    "olmo": Architecture(
        "OlmoForCausalLM", PRE | {"norm": "layernorm"}, {"elementwise_affine": False, "eps": 1e-5},
        lambda config: USUAL | {"clip_qkv": None},
        eps="",
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM", PRE | {"placement": "reordered", "qk_norm": "full"}, RMSNORM,
        lambda config: USUAL,
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM", PRE | {"norm": "layernorm"}, {"elementwise_affine": True, "bias": True},
        lambda config: {
            "hidden_act": "silu", "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_qkv_bias": False,
            "qk_layernorm": False, "use_parallel_residual": False, "head_dim": config.dim // config.heads,
        },
        eps="layer_norm_eps",
        defaults={"partial_rotary_factor": 0.25},
        carries=("rotary_fraction",),
    ),
}  # fmt: skip


def _differences(config: ModelConfig, architecture: Architecture) -> list[str]:
    """What is not as the architecture has it. An option or argument of a norm that it does not name has its default."""
    defaults = {each.name: each.default for each in inspect.signature(KINDS[config.norm]).parameters.values()}
    carried = {*architecture.norm_args, "eps", "cast_order"}  # the order of casts changes rounding only
    computed = [each.name for each in fields(ModelConfig) if each.metadata["export"] == "computed"]
    theirs = {name: getattr(ModelConfig(), name) for name in computed}
    theirs |= {name: defaults[name] for name in config.norm_args if name not in carried}
    theirs |= architecture.ours | architecture.norm_args
    theirs = {name: value for name, value in theirs.items() if name not in ("norm_args", *architecture.carries)}
    if config.dim % config.heads or "head_dim" in architecture.fixed(config):
        theirs["head_dim"] = config.dim / config.heads
    ours = NORM_DEFAULTS | asdict(config) | config.norm_args
    return [f"{name} {value}, not {ours[name]}" for name, value in theirs.items() if ours[name] != value]


def to_theirs(config: ModelConfig) -> Fields:
    """The fields of Hugging Face's configuration that say what the model computes. Raises ValueError if none can."""
    nearest = min(ARCHITECTURES, key=lambda model_type: len(_differences(config, ARCHITECTURES[model_type])))
    architecture = ARCHITECTURES[nearest]
    differences = _differences(config, architecture)
    if differences:
        reason = f"{architecture.name.removesuffix('ForCausalLM')}, the nearest, has {', '.join(differences)}"
        raise ValueError(f"no Hugging Face architecture computes this: {reason}")
    theirs: Fields = {"model_type": nearest, "architectures": [architecture.name]}
    theirs |= {name: getattr(config, ours) for name, ours in SIZES.items()}
    if architecture.eps:
        theirs[architecture.eps] = config.norm_args.get("eps", 1e-6 if config.norm == "rmsnorm" else 1e-5)
    scaling = {"rope_type": "llama3"} | config.rope_scaling if config.rope_scaling else None
    theirs["max_position_embeddings"] = max(config.context, config.trained_context or 0)
    carries = "rotary_fraction" in architecture.carries
    rotated = {"partial_rotary_factor": config.rotary_fraction} if carries else {}
    theirs |= {"tie_word_embeddings": config.tie_embeddings, "rope_theta": config.rope_theta, **rotated}
    if scaling:
        scaling[ROPE_SCALING[-1]] = int(scaling[ROPE_SCALING[-1]])  # transformers asks for an integer
    theirs["rope_scaling"] = scaling  # the spelling of transformers 4; the next is that of 5
    theirs["rope_parameters"] = (scaling or {"rope_type": "default"}) | {"rope_theta": config.rope_theta} | rotated
    return theirs | architecture.fixed(config)


def from_theirs(theirs: Fields) -> ModelConfig:
    """Our configuration for one of Hugging Face's. Raises ValueError, naming the field, for what we do not compute."""
    model_type = theirs.get("model_type", "")
    supported = list(ARCHITECTURES)
    require(model_type in supported, f"model_type {model_type!r} is not supported; {', '.join(supported)} are")
    architecture = ARCHITECTURES[model_type]
    names = theirs.get("architectures")
    require(names in (None, [architecture.name]), f"architectures must be [{architecture.name!r}], not {names!r}")
    theirs = architecture.defaults | {name: value for name, value in theirs.items() if value is not None}
    theirs |= {"hidden_act": "silu"} if theirs.get("hidden_act") == "swish" else {}  # two names of one function
    given = dict(architecture.ours)
    for name, ours in SIZES.items():
        value = theirs.get(name)
        if value is not None or name not in OPTIONAL:
            valid = type(value) is int and 1 <= value <= MAX_SIZE
            require(valid, f"{name} must be a positive integer up to {MAX_SIZE}, not {value!r}")
            given[ours] = value
    norm_args = dict(architecture.norm_args)
    if architecture.eps:
        norm_args["eps"] = _number(theirs, architecture.eps, 1e-5)
    tied = theirs.get("tie_word_embeddings", False)
    require(is_a(tied, bool), "tie_word_embeddings must be true or false")
    rope = _rope(theirs)
    whole = rope["rotary_fraction"] == 1 or "rotary_fraction" in architecture.carries
    require(whole, f"partial_rotary_factor {rope['rotary_fraction']} is not supported with {architecture.name}")
    config = ModelConfig(**rope | given, norm_args=norm_args, tie_embeddings=tied)
    windows = [kind for kind in theirs.get("layer_types", []) if kind != "full_attention"]
    require(not windows, f"layer_types {windows[:1]} is not supported, only 'full_attention'")
    fixed = COMMON | architecture.fixed(config)
    for name, value in fixed.items():
        actual = theirs.get(name, value)
        if name.endswith("_dropout") and _number(theirs, name, value) > 0:
            warn(f"{name} {actual} is not used: --dropout is that of training")
        else:
            require(actual == value, f"{name} {actual!r} is not supported, only {value!r}")
    known = {*SIZES, *OTHERS.split(), *fixed, *architecture.unused, architecture.eps}
    for name in (name for name in theirs.keys() - known if not name.startswith("unsloth_")):
        raise ValueError(f"{name!r} is not a known field of {architecture.name}, and may change what it computes")
    return config


def _rope(theirs: Fields) -> Fields:
    """Our fields for the rotary positions, from the spelling of transformers 4 or 5."""
    spelling = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(spelling) or {}
    require(isinstance(rope, dict), f"{spelling} must be an object, not {rope!r}")
    rope = {name: value for name, value in rope.items() if value is not None}
    everything = theirs | rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    if (kind, rope.get("factor")) == ("linear", 1):  # a factor of 1 changes nothing
        kind, _ = "default", rope.pop("factor")
    require(kind in ("default", "llama3"), f"{spelling} of type {kind!r} is not supported; default and llama3 are")
    names = ROPE_SCALING if kind == "llama3" else ()
    for name in rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *names}:
        raise ValueError(f"{spelling} has {name!r}, which is not supported with type {kind!r}")
    rope = {"original_max_position_embeddings": theirs["max_position_embeddings"]} | rope
    theta, fraction = _number(everything, "rope_theta", 10000.0), _number(everything, "partial_rotary_factor", 1.0)
    scaling = {name: _number(rope, name, None) for name in names}
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_fraction": fraction}


def _number(given: Fields, name: str, default: float | None) -> float:
    value: Any = default if given.get(name) is None else given[name]
    require(is_a(value, float) and math.isfinite(value), f"{name} must be a number, not {value!r}")
    return float(value)
