"""Every recipe against the released code: transformers' model of the family, built in this process on a tiny
configuration, gives its weights to ours, and both compute the same in float64.

Windows, experts, biases, partial rotary positions and layers without positions are switched off in `THEIRS`, and what
folds into weights is folded by `to_ours`. docs/recipes.md lists it for each family.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.func import functional_call
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

from config import configure
from model import Llama
from recipes import RECIPES
from runtime.huggingface.weights import hugging_face_name
from tests.random_values import fp32_is_float64

State = dict[str, Tensor]
TOKENS = torch.randint(0, 63, (2, 17), generator=torch.Generator().manual_seed(0))
SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden_dim": 48, "context": 64}
SIZES |= {"vocab_size": 64, "tie_embeddings": False}
FULL, ROPE = ["full_attention"] * 2, {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
BASE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1, "rms_norm_eps": 1e-6, "rope_parameters": ROPE,
    "attention_bias": False, "layer_types": FULL, "sliding_window": 64,
}  # fmt: skip
BY_LAYER = {"full_attention": ROPE, "sliding_attention": ROPE}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
DENSE = {"num_local_experts": 1, "num_experts_per_tok": 1}
THEIRS: dict[str, dict[str, Any]] = {  # what their configurations have besides BASE
    "ministral3": {"rope_parameters": ROPE | {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 64}},
    "exaone4": {"sliding_window": None},
    "olmo3": {"rope_parameters": BY_LAYER},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "gemma2": {"query_pre_attn_scalar": 8, **CAPS},
    "vaultgemma": {"query_pre_attn_scalar": 8, **CAPS},
    "gemma3": {"model_type": "gemma3_text", "query_pre_attn_scalar": 8, "rope_parameters": BY_LAYER},
    "gemma4": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    | {"global_head_dim": 8, "rope_parameters": BY_LAYER, "rms_norm_eps": 1e-3},
    "glm4_moe": {"use_qk_norm": True, "first_k_dense_replace": 2},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1}
    | {"logits_scaling": 7.0},
    "smollm3": {"no_rope_layers": [1, 1]},
    "seed_oss": {"attention_out_bias": False, "attention_dropout": 0.0},
    "minimax_m2": DENSE,
    "solar_open": {"num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 2, "n_shared_experts": 1}
    | {"moe_intermediate_size": 48, "routed_scaling_factor": 1.0},
    "qwen3_next": {"num_experts": 0},
    "qwen3_5": {"model_type": "qwen3_5_text", "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "step3p7": {"model_type": "step3p5", "pad_token_id": 63, "mlp_layer_types": ["dense"] * 2}
    | {"query_pre_attn_scalar": 8, "rope_parameters": {"full_attention": ROPE}},
    "laguna": {"mlp_layer_types": ["dense"] * 2, "num_attention_heads_per_layer": [4, 4], "gating": True}
    | {"rope_parameters": {"full_attention": ROPE}},
    "afmoe": {"layer_types": ["sliding_attention"] * 2, "num_dense_layers": 2, "mup_enabled": False},
    "muse_glimmer": {"model_type": "muse_glimmer_text", "layer_rope_theta": [1e4, 1e4], "post_norm_eps": 1e-6}
    | {"qk_scale_factor": 1.0},
    "llama4": {"model_type": "llama4_text", "moe_layers": [], "intermediate_size_mlp": 48, "no_rope_layers": [1, 1]}
    | {"attention_chunk_size": 64, "attn_temperature_tuning": False, "use_qk_norm": True},
    "nanochat": {"final_logit_softcapping": 3.0, "rms_norm_eps": 1e-3},
    "bitnet": {"rms_norm_eps": 1e-3},
    "starcoder2": {"use_bias": False},
    "cohere2": {"layer_types": ["sliding_attention"] * 2},
    "minimax": DENSE | {"full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.7}
    | {"mlp_alpha_factor": 1.5, "mlp_beta_factor": 0.7},
    "deepseek_v4": {"layer_types": ["heavily_compressed_attention"] * 2, "mlp_layer_types": ["moe"] * 2}
    | {"q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8}
    | {"n_routed_experts": 2, "moe_intermediate_size": 48} | DENSE,
    "glm5_next": {"model_type": "glm5_next_text", "num_key_value_heads": 4, "layer_types": ["linear_attention"] * 2}
    | {"mlp_layer_types": ["dense"] * 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 0}
    | {"qk_nope_head_dim": 8, "v_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 2, "n_routed_experts": 2}
    | {"num_experts_per_tok": 1, "moe_intermediate_size": 48, "index_head_dim": 8, "index_n_heads": 2, "hc_mult": 4},
    "inkling2": {"model_type": "inkling2_text", "num_hidden_layers": 4, "layer_types": ["hybrid_sliding"] * 4}
    | {"n_layers_per_attn_res_block": 2, "unpadded_vocab_size": 64, "swa_num_attention_heads": 4, "swa_head_dim": 8}
    | {"swa_num_key_value_heads": 2, "sliding_window_size": 64, "d_rel": 4, "rel_extent": 16, "n_routed_experts": 2}
    | {"num_experts_per_tok": 1, "moe_intermediate_size": 48, "final_logit_softcapping": 3.0},
}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {  # what our models have besides SIZES: caps that matter at these sizes
    **{name: {"norm_args": {"eps": 1e-3}} for name in ("gemma4", "nanochat", "bitnet")},
    "granite": {"embedding_scale": 3.0},
    "minimax": {"placement_args": {"alpha": 1.5, "beta": 0.7}},
    "inkling2": {"layers": 4, "placement_args": {"layers": 2}},
}
SMALL_CAPS = {"attention_cap": 5.0, "logit_cap": 3.0}
# Ours adds the head.
WITHOUT_HEAD = {"step3p7": "Step3p7TextModel", "muse_glimmer": "MuseGlimmerTextModel", "glm5_next": "Glm5NextTextModel"}
# Their attention and MLP are not ours, so Llama's take their places inside their own layers.
LLAMAS_SUBLAYERS = ("deepseek_v4", "glm5_next", "inkling2")
HYPER = {"input_layernorm": "attention_residual.norm", "post_attention_layernorm": "mlp_residual.norm"}
HYPER |= {"attn_hc": "attention_residual", "ffn_hc": "mlp_residual", "fn": "maps.weight", "norm": "norm.norm"}
HYPER |= {"hc_head": "norm", "hc_fn": "maps.weight", "hc_base": "base", "hc_scale": "scale"}
MIXTURE = {"input_layernorm": "attention_residual.norm", "attention_input": "attention_residual"}
MIXTURE |= {"post_attention_layernorm": "mlp_residual.norm", "mlp_input": "mlp_residual"}
MIXTURE |= {"final_input": "norm", "norm": "norm.norm", "embed_norm": "norm"}
RENAMED: dict[str, dict[str, str]] = {
    **{name: {"input_layernorm": "attention_residual.norm"} for name in ("cohere", "cohere2")},
    "minimax": {"input_layernorm": "attention_residual.norm", "post_attention_layernorm": "mlp_residual.norm"},
    **dict.fromkeys(("deepseek_v4", "glm5_next"), HYPER),
    "inkling2": MIXTURE,
    "glm4": {"post_self_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"}
    | {"post_attention_layernorm": "pre_feedforward_layernorm"},
    "vaultgemma": {"pre_feedforward_layernorm": "post_attention_layernorm"},
    "afmoe": {"pre_mlp_layernorm": "pre_feedforward_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"},
    "hunyuan_v1_dense": {"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
    **{name: {"g_proj": "gate_proj"} for name in ("laguna", "step3p7")},
    "starcoder2": {"c_fc": "up_proj", "c_proj": "down_proj"},
    "nanochat": {"fc1": "up_proj", "fc2": "down_proj"},
    "bitnet": {"attn_sub_norm": "inner_norm", "ffn_sub_norm": "inner_norm"},
    "llama4": {"feed_forward": "mlp"},
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with fp32_is_float64():
        yield
    torch.set_default_dtype(before)


class TheirAttention(LlamaAttention):
    def forward(self, hidden_states: Tensor, **others: Any) -> Any:  # type: ignore[override]
        length = hidden_states.shape[1]
        positions = LlamaRotaryEmbedding(self.config)(hidden_states, torch.arange(length)[None])
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        y, weights = super().forward(hidden_states, positions, mask)
        return y if self.alone else (y, weights)


class TheirMLP(LlamaMLP):
    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return super().forward(x)


class Unchanged(torch.nn.Module):
    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return x


@cache
def their_model(name: str) -> Any:
    """With random weights: sharp attention, gains far from 1 and biases of norms far from 0; others are 0."""
    config = transformers.AutoConfig.for_model(**BASE | {"model_type": name} | THEIRS.get(name, {}))
    config._attn_implementation = config._experts_implementation = "eager"
    if name == "olmo_hybrid":  # its checks ask for a layer that is not attention
        config.layer_types = FULL
    if name in WITHOUT_HEAD:
        model = getattr(import_module(f"transformers.models.{name}.modeling_{name}"), WITHOUT_HEAD[name])(config).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if name in LLAMAS_SUBLAYERS:
        llama = transformers.LlamaConfig(**BASE | {"attn_implementation": "eager"})
        for layer in getattr(model, "model", model).layers:
            layer.self_attn, layer.mlp = TheirAttention(llama, 0), TheirMLP(llama)
            layer.self_attn.alone = name == "glm5_next"
            layer.post_attention_convolution = layer.post_mlp_convolution = Unchanged()  # inkling2's
    generator = torch.Generator().manual_seed(1)
    for path, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        scale = 1.5 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 0.3
        centered = weight.ndim > 1 or path.endswith("bias")
        weight.data = noise * scale + (not centered)
        if path.endswith("proj.bias") or (name == "solar_open" and ".experts." in path):
            weight.data.zero_()
    return model


def split(state: State, fused: str, *parts: tuple[str, int]) -> State:
    """Replace each matrix `fused` by parts with so many rows."""
    for path in [path for path in state if f".{fused}" in path]:
        rows = state.pop(path).split([size for _, size in parts])
        state |= {path.replace(fused, name): weight for (name, _), weight in zip(parts, rows, strict=True)}
    return state


def to_ours(name: str, state: State) -> State:
    """The weights under the names of Hugging Face's Llama, as functions of theirs."""
    renamed, state = RENAMED.get(name, {}), {path.removeprefix("model."): weight for path, weight in state.items()}
    state = {".".join(renamed.get(part, part) for part in path.split(".")): state[path] for path in state}
    if name in ("minimax", "minimax_m2"):  # one expert
        state = {path + ".weight" * (".experts" in path): weight.squeeze(0) for path, weight in state.items()}
    expert = ".shared_experts" if name == "solar_open" else ".experts"
    state = {path.replace(expert, ""): weight for path, weight in state.items()}
    if name in ("phi3", "glm", "glm4", "minimax", "minimax_m2"):
        state = split(state, "gate_up_proj", ("gate_proj", 48), ("up_proj", 48))
        state = split(state, "qkv_proj", ("q_proj", 32), ("k_proj", 16), ("v_proj", 16))
    for path, weight in list(state.items()):
        turned = path.endswith(("q_proj.weight", "k_proj.weight"))
        if name in ("glm", "glm4", "helium", "ernie4_5", "llama4", "cohere", "cohere2") and turned:
            state[path] = weight.unflatten(0, (-1, 4, 2)).transpose(1, 2).flatten(0, 2)  # it rotates pairs (2i, 2i + 1)
        if name == "nanochat" and turned:  # it rotates the other way
            state[path] = weight.unflatten(0, (-1, 2, 4)).flip(1).flatten(0, 2)
        if name in ("qwen3_next", "qwen3_5") and "q_proj" in path:  # for each head, the query and the gate
            query, gate = weight.unflatten(0, (4, 2, 8)).unbind(1)
            state |= {path: query.flatten(0, 1), path.replace("q_proj", "gate_proj"): gate.flatten(0, 1)}
        if name == "gemma4" and "q_norm" in path:  # its scores are not divided by √D
            state[path] = weight * 8**0.5
        if name == "granite":
            factor = {"q_proj": 0.1 * 8**0.5, "o_proj": 0.22, "down_proj": 0.22, "norm": 1 / 7}
            state[path] = weight * factor.get(path.split(".")[-2], 1.0)
        if name in ("cohere", "cohere2") and path == "norm.weight":  # its factor of the logits
            state[path] = weight * their_model(name).logit_scale
    if name == "muse_glimmer":  # its final norm is not zero-centered
        state["norm.weight"] = state["norm.weight"] - 1
    return state


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_released_code(name):
    """Its outputs, and the gradients of all of their weights. That each option matters is in test_options.py."""
    model_of_theirs = their_model(name)
    weights = dict(model_of_theirs.named_parameters())
    caps = {option: value for option, value in SMALL_CAPS.items() if option in RECIPES[name]}
    model = Llama(configure({"recipe": name, **SIZES, **caps, **OURS.get(name, {})})[0]).double().eval()
    state, given = to_ours(name, weights), {}
    for path, weight in model.named_parameters():
        weight.data.normal_(generator=torch.Generator().manual_seed(3))  # of a head that they do not have
        their_path = hugging_face_name(path, model.config).removeprefix("model.").replace("rotated_", "")
        given[path] = state.get(their_path, weight)
    output, ours = model_of_theirs(TOKENS, use_cache=False), functional_call(model, given, (TOKENS,))
    theirs = output.logits if "logits" in output else model.logits(output.last_hidden_state)
    assert theirs.dtype == torch.float64 and (ours - theirs).norm() <= 1e-12 * theirs.norm()
    weights = {path: weight for path, weight in weights.items() if weight.any()}  # not biases of attention, experts
    direction = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    sums = ((direction * logits).sum() for logits in (theirs, ours))
    gradients = (torch.autograd.grad(each, [*weights.values()], allow_unused=True) for each in sums)
    for path, expected, found in zip(weights, *gradients, strict=True):
        if found is None:  # a router's, with one expert or experts that are 0
            assert expected is None or expected.norm() <= 1e-12, path
        else:
            assert (found - expected).norm() <= 1e-12 * expected.norm(), path


def test_caps_and_blocks_are_as_large_as_in_released_models():
    """The models above have smaller ones."""
    for name, row in RECIPES.items():
        config = transformers.AutoConfig.for_model(THEIRS.get(name, {}).get("model_type", name))
        for option, field in zip(SMALL_CAPS, CAPS, strict=True):
            assert row.get(option) == getattr(config, field, None), name
        assert row.get("placement_args", {}).get("layers") == getattr(config, "n_layers_per_attn_res_block", None), name
