"""Hugging Face directories that are refused, older checkpoints, and models that no architecture expresses."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim import AdamW

import generate
import train
from config import ModelConfig
from data.tokenizer import ByteTokenizer
from model import Llama
from norms import KINDS
from norms.placement import PLACEMENTS
from runtime.checkpoint import load_pretrained, load_training_state, save_checkpoint, save_pretrained, sha256
from runtime.huggingface.architectures import Inexpressible, architecture_of, from_theirs, to_theirs
from runtime.huggingface.directory import stored_state
from runtime.huggingface.names import hugging_face_name

SIZES: dict[str, Any] = dict(dim=16, layers=2, heads=2, hidden_dim=24, context=16, vocab_size=257)
LLAMA = ModelConfig(**SIZES, tie_embeddings=False)
OTHERS = {
    "qwen3": ModelConfig(**SIZES, qk_norm="head"),
    "gemma2": ModelConfig(
        **SIZES, placement="sandwich", norm_args={"zero_centered": True}, embedding_scale=4.0
    ),
}  # fmt: skip
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write(directory: Path, config: ModelConfig = LLAMA) -> Path:
    """A directory as `transformers` leaves it, without our key. Replaces what is there."""
    shutil.rmtree(directory, ignore_errors=True)
    save_pretrained(directory, Llama(config), ByteTokenizer())
    change_config(directory, normal_llama=None)
    return directory


def change_config(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != ()}))


def change_rope(directory: Path, **fields: Any) -> None:
    change_config(directory, rope_scaling=None, rope_parameters={"rope_theta": 1e4} | fields)


def change_weights(directory: Path, change: Callable[[dict], Any]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


def shard(directory: Path, **moved: str) -> None:
    """Two files with an index, which names the files in `moved` for some tensors."""
    weights = load_file(directory / "model.safetensors")
    files = {name: SHARDS[number % 2] for number, name in enumerate(sorted(weights))}
    for file in SHARDS:
        save_file({name: weights[name] for name in files if files[name] == file}, directory / file)
    index = {"metadata": {}, "weight_map": files | moved}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()


def without_shard(directory: Path) -> None:
    shard(directory)
    (directory / SHARDS[1]).unlink()


def with_damaged_index(directory: Path) -> None:
    shard(directory)
    (directory / "model.safetensors.index.json").write_text("[]")


def pickled(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    torch.save(weights, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def of_meta(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "params.json").write_text('{"dim": 16}')
    (directory / "consolidated.00.pth").write_bytes(b"pickle")


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another architecture": (lambda d: change_config(d, model_type="mistral"), "model_type 'mistral' is not supported"),
    "no architecture": (lambda d: change_config(d, model_type=()), "model_type None is not supported"),
    "a classifier": (
        lambda d: change_config(d, architectures=["LlamaForSequenceClassification"]),
        r"architectures must be \['LlamaForCausalLM'\]",
    ),
    "a width that is text": (lambda d: change_config(d, hidden_size="16"), "hidden_size must be a positive integer"),
    "no depth": (lambda d: change_config(d, num_hidden_layers=()), "num_hidden_layers must be a positive integer"),
    "a width beyond float64": (lambda d: change_config(d, hidden_size=10**400), "hidden_size must be a positive"),
    "an eps beyond float64": (lambda d: change_config(d, rms_norm_eps=10**400), "rms_norm_eps must be a number"),
    "a model_type that is a list": (lambda d: change_config(d, model_type=["llama"]), "model_type .* is not supported"),
    "a field of two lines": (lambda d: change_config(d, **{"a\nb": 1}), r"'a\\nb' is a field that"),
    "an odd head": (lambda d: change_config(d, head_dim=7), "--head-dim is odd"),
    "biases": (lambda d: change_config(d, attention_bias=True), "attention_bias True is not supported, only False"),
    "GELU": (lambda d: change_config(d, hidden_act="gelu"), "hidden_act 'gelu' is not supported, only 'silu'"),
    "dropout": (lambda d: change_config(d, attention_dropout=0.1), "attention_dropout 0.1 is not supported"),
    "quantized": (lambda d: change_config(d, quantization_config={"bits": 4}), "quantization_config is a field that"),
    "a sliding window": (lambda d: change_config(d, sliding_window=8), "sliding_window is a field that"),
    "YaRN": (lambda d: change_rope(d, rope_type="yarn", factor=4), "rope_parameters of type 'yarn' is not supported"),
    "YaRN in transformers 4": (
        lambda d: change_config(d, rope_scaling={"type": "yarn", "factor": 4}),
        "rope_scaling of type 'yarn' is not supported",
    ),
    "half of Llama 3's scaling": (lambda d: change_rope(d, rope_type="llama3", factor=8), "low_freq_factor must be"),
    "unknown scaling": (lambda d: change_rope(d, rope_type="default", factor=8), "rope_parameters has 'factor'"),
    "partial RoPE": (lambda d: change_rope(d, partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported"),
    "our key damaged": (lambda d: change_config(d, normal_llama=[1]), "normal_llama is damaged"),
    "our key with a width that is text": (
        lambda d: change_config(d, normal_llama={"model": {"dim": "16"}, "tokenizer": "bytes"}),
        "normal_llama: dim must be of type int, not '16'",
    ),
    "config.json damaged": (lambda d: (d / "config.json").write_text("{"), r"config\.json is missing or damaged"),
    "a missing shard": (without_shard, r"model-00002-of-00002\.safetensors is missing"),
    "a shard elsewhere": (
        lambda d: shard(d, **{"lm_head.weight": "../model.safetensors"}),
        r"weight_map names '\.\./model\.safetensors', which is not",
    ),
    "a wrong index": (lambda d: shard(d, **{"lm_head.weight": SHARDS[1]}), "lacks lm_head.weight, which"),
    "a damaged index": (
        with_damaged_index,
        "not a readable index with a weight_map",
    ),
    "pickled weights": (pickled, r"pytorch_model\.bin is a pickle, which can run code"),
    "Meta's layout": (of_meta, "is of Meta's layout, whose weights are pickles"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"holds no model\.safetensors"),
    "half a file": (cut, r"model\.safetensors: not a readable safetensors file"),
    "a missing tensor": (
        lambda d: change_weights(d, lambda w: w.pop("model.norm.weight")),
        r"lacks model\.norm\.weight",
    ),
    "another tensor": (
        lambda d: change_weights(d, lambda w: w.update({"model.layers.0.mlp.up_proj.bias": torch.ones(24)})),
        r"has an unknown model\.layers\.0\.mlp\.up_proj\.bias",
    ),
    "another shape": (
        lambda d: change_weights(d, lambda w: w.update({"lm_head.weight": torch.ones(16, 257)})),
        r"has another shape of lm_head\.weight",
    ),
    "integers": (
        lambda d: change_weights(d, lambda w: w.update({"lm_head.weight": torch.ones(257, 16, dtype=torch.int8)})),
        r"another dtype than F32, BF16 or F16 of lm_head\.weight",
    ),
    "tied to another head": (lambda d: change_config(d, tie_word_embeddings=True), "lm_head.weight is not the embed"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "holds no tokenizer"),
    "another vocabulary": (lambda d: write(d, ModelConfig(**SIZES | {"vocab_size": 300})), "257 ids and the model 300"),
    "qwen3 with sliding windows": (
        lambda d: change_config(write(d, OTHERS["qwen3"]), use_sliding_window=True),
        "use_sliding_window True is not supported",
    ),
    "gemma2 with soft caps": (
        lambda d: change_config(write(d, OTHERS["gemma2"]), attn_logit_softcapping=()),
        "attn_logit_softcapping 50.0 is not supported, only None",
    ),
    "gemma2 with GELU": (
        lambda d: change_config(write(d, OTHERS["gemma2"]), hidden_activation=()),
        "hidden_activation 'gelu_pytorch_tanh' is not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_directories_that_are_refused(case, tmp_path, capsys):
    break_it, message = REFUSED[case]
    directory = write(tmp_path / "theirs")
    break_it(directory)
    commands = [
        lambda: generate.main(["--checkpoint", str(directory), "--device", "cpu"]),
        lambda: train.main(["--init-from", str(directory), "--device", "cpu", "--out", str(tmp_path / "run")]),
    ]
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            command()
        printed = capsys.readouterr()
        assert stopped.value.code == 2 and printed.out == ""
        assert printed.err.count("\n") == 1, printed.err
        with pytest.raises(ValueError, match=message):
            raise ValueError(printed.err)


def test_a_directory_in_shards_with_a_buffer_of_old_versions_is_read(tmp_path):
    directory = write(tmp_path / "theirs")
    change_weights(directory, lambda w: w.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    shard(directory)
    assert load_pretrained(directory)[0].config.dim == 16


# --- models that no architecture expresses ---------------------------------------------------------------------------


def test_every_norm_and_placement_is_saved_and_read_again(tmp_path):
    transformers = pytest.importorskip("transformers")
    variants: list[dict[str, Any]] = [
        *({"norm": norm} for norm in sorted(KINDS)), *({"placement": name, "layers": 4} for name in PLACEMENTS),
        {"scaled_embedding": True}, {"embedding_scale": 2.0}, {"norm_args": {"zero_centered": True}},
        {"norm": "layernorm", "norm_args": {"bias": False}},
        {"norm": "layernorm", "head_dim": 6}, {"heads": 3, "head_dim": 6},
        {"norm": "layernorm", "norm_args": {"elementwise_affine": False, "eps": 1e-3}},
        {"placement": "sandwich", "norm_args": {"zero_centered": True}},
    ]  # fmt: skip
    expressed = []
    for number, variant in enumerate(variants):
        model, directory = Llama(ModelConfig(**SIZES | variant)), tmp_path / str(number)
        save_pretrained(directory, model, ByteTokenizer())
        loaded, _ = load_pretrained(directory)
        assert loaded.config == model.config
        state = loaded.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
        described = json.loads((directory / "config.json").read_text())
        if described["model_type"] != "normal-llama":
            expressed.append(variant)
            continue
        assert "Hugging Face" in described["not_in_transformers"]
        with pytest.raises(ValueError, match="normal-llama"):
            transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert expressed == [{"norm": "layernorm"}, {"norm": "rmsnorm"}, {"placement": "pre", "layers": 4}]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"placement": "post"}, "no architecture of Hugging Face has --placement post --norm rmsnorm --qk-norm none"),
        ({"scaled_embedding": True}, "Hugging Face's Llama has no --scaled-embedding"),
        ({"embedding_scale": 2.0}, "Llama has --embedding-scale 1, not 2"),
        ({"norm_args": {"zero_centered": True}}, "Llama has --norm-arg zero_centered=false, not True"),
        ({"heads": 3, "head_dim": 6}, "Llama needs --dim divisible by --heads"),
        ({"norm": "layernorm", "head_dim": 6}, "StableLm has --head-dim 8, not 6"),
    ],
)
def test_reasons_name_the_setting(changes, reason):
    with pytest.raises(Inexpressible, match=reason):
        architecture_of(ModelConfig(**SIZES | changes))


def test_fields_changed_by_others_count_more_than_ours(tmp_path):
    config = dataclasses.replace(LLAMA, dropout=0.25, norm_args={"cast_order": "llama"})
    save_pretrained(tmp_path, Llama(config), ByteTokenizer())
    assert load_pretrained(tmp_path)[0].config == config
    change_config(tmp_path, rms_norm_eps=0.5)
    changed = load_pretrained(tmp_path)[0].config
    assert changed.norm_args["eps"] == 0.5 and changed == from_theirs(to_theirs(changed))


# --- older checkpoints of ours ---------------------------------------------------------------------------------------


def test_checkpoints_with_our_names_are_read_and_resumed(tmp_path):
    model = Llama(LLAMA, seed=1)
    optimizers: list = [AdamW(model.parameters())]
    checkpoint = save_checkpoint(tmp_path, 1, model, ByteTokenizer(), optimizers, {}, 1)
    names = {hugging_face_name(name, LLAMA): name for name in stored_state(model)}
    assert "model.norm.weight" in names

    def rename(weights: dict) -> None:
        for theirs, ours in names.items():
            weights[ours] = weights.pop(theirs)

    change_weights(checkpoint, rename)
    old = {"model": dataclasses.asdict(LLAMA), "tokenizer": "bytes"}
    del old["model"]["head_dim"], old["model"]["rope_scaling"], old["model"]["embedding_scale"]  # type: ignore
    (checkpoint / "config.json").write_text(json.dumps(old))
    hashes = {path.name: sha256(path) for path in checkpoint.iterdir() if path.name != "manifest.json"}
    (checkpoint / "manifest.json").write_text(json.dumps(hashes))
    resumed = Llama(LLAMA, seed=2)
    load_training_state(checkpoint, resumed, [AdamW(resumed.parameters())])
    for loaded in (load_pretrained(checkpoint, "cpu")[0], resumed):
        assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(("norm", "field"), [("rmsnorm", "rms_norm_eps"), ("layernorm", "layer_norm_eps")])
def test_the_default_eps_of_the_norm_is_written(norm, field):
    config = dataclasses.replace(LLAMA, norm=norm, norm_args={})
    assert to_theirs(config)[field] == Llama(config).get_submodule("layers.0.attention_residual.norm").eps


@pytest.mark.parametrize("model_type", [*OTHERS, "llama"])
def test_missing_fields_have_the_defaults_of_transformers(model_type):
    transformers = pytest.importorskip("transformers")
    theirs = to_theirs(OTHERS.get(model_type, LLAMA))
    default = transformers.AutoConfig.for_model(model_type)
    for name in ("rms_norm_eps", "layer_norm_eps", "rope_theta", "tie_word_embeddings"):
        if name in theirs:
            expected = default.rope_parameters[name] if name == "rope_theta" else getattr(default, name)
            without = {field: value for field, value in theirs.items() if field not in (name, "rope_parameters")}
            assert from_theirs(without) == from_theirs(without | {name: expected}), name


def test_the_original_context_of_rope_scaling_is_an_integer_as_transformers_wants():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32.0}
    theirs = to_theirs(dataclasses.replace(LLAMA, rope_scaling=scaling))
    assert type(theirs["rope_parameters"]["original_max_position_embeddings"]) is int
    assert from_theirs(theirs).rope_scaling == scaling
