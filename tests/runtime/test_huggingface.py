"""Hugging Face directories that are read or refused, also hostile ones; models that no architecture expresses."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import generate
from config import ModelConfig, configure
from data.tokenizer import ByteTokenizer, train_tokenizer
from files import read_json, sha256
from model import Llama
from norms import KINDS
from norms.placement import PLACEMENTS
from recipes import RECIPES, ROWS
from runtime.checkpoint import load_pretrained, save_pretrained, weight_hashes
from runtime.huggingface.architectures import ARCHITECTURES, OTHERS, from_theirs, layout, to_theirs
from runtime.huggingface.architectures import SIZES as SIZES_OF_THEIRS

SIZES: dict[str, Any] = dict(dim=16, layers=2, heads=2, hidden_dim=24, context=16, vocab_size=257)
LLAMA = ModelConfig(**SIZES, tie_embeddings=False)
QWEN3 = ModelConfig(**SIZES, qk_norm="head")
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


def shard(directory: Path, moved: dict[str, str] | None = None, /, **others: torch.Tensor) -> None:
    """Two files with an index, which names the files in `moved` for some tensors, and holds `others`."""
    weights = load_file(directory / "model.safetensors") | others
    files = {name: SHARDS[number % 2] for number, name in enumerate(sorted(weights))}
    for file in SHARDS:
        save_file({name: weights[name] for name in files if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files | (moved or {})}))
    (directory / "model.safetensors").unlink()


def pad(directory: Path, special: bool = True) -> None:
    """Add a token to the tokenizer, and not to the model."""
    fields = json.loads((directory / "tokenizer.json").read_text())
    fields["added_tokens"] += [fields["added_tokens"][0] | {"id": 257, "content": "[PAD]", "special": special}]
    (directory / "tokenizer.json").write_text(json.dumps(fields))


# How a directory is changed, and what the error says of it. `()` removes a field.
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "\x1b[2J"}, r"model_type '\\x1b\[2J' is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, r"architectures must be \['LlamaForCausalLM'\]"),
    ({"num_hidden_layers": 30_000}, "--layers must be at most 4096, not 30000"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
    ({"max_position_embeddings": ()}, "config.json: max_position_embeddings is missing"),
    ({"attention_bias": True}, "attention_bias True is not supported, only False"),
    ({"quantization_config": {"bits": 4}}, "quantization_config .* is not supported, only None"),
    ({"sliding_window": 8}, "'sliding_window' is not a known field of Llama"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "RoPE of type 'yarn' is not supported"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor must be"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "RoPE of type 'linear' is not supported"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 500.0}}}, "RoPE has 'full_attention', which is not supp"),
    ({"original_max_position_embeddings": 16}, "'original_max_position_embeddings' is not a known field of Llama"),
    ({"is_causal": None}, "is_causal None is not supported, only True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types \['sliding_attention'\] is not supported"),
    ({"tie_word_embeddings": True}, "lm_head.weight is not the embedding"),
    ({"eos_token_id": [1, "x"]}, "eos_token_id must be a token id or a list of them"),
    ({"model_type": "granite", "architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "must be positive"),
    ({"normal_llama": {"format": 2}}, "another version of normal-llama wrote it: its format is 2, not 1"),
    ({"normal_llama": {"format": 1, "model": {}, "tokenizer": "bytes"}}, "normal_llama lacks 'imports'"),
]
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing shard": (lambda d: shard(d, {"lm_head.weight": "3.safetensors"}), r"3\.safetensors: not a readable"),
    "a file elsewhere": (lambda d: shard(d, {"lm_head.weight": "../a.safetensors"}), "weight_map names what is not"),
    "an index without a map": (
        lambda d: (d / "model.safetensors").rename(d / "model.safetensors.index.json").write_text("{}"),
        "not an index with a weight_map",
    ),
    "pickled weights": (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "pickled weights can run"),
    "an adapter": (lambda d: (d / "adapter_config.json").write_text("{}"), "adapter_config.json is of an adapter"),
    "a huge header": (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 8), "not a readable safetensors file"),
    "a deep tokenizer": (lambda d: (d / "tokenizer.json").write_bytes(b"[" * 100_000), r"tokenizer\.json"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "holds no tokenizer"),
    "text beyond the vocabulary": (lambda d: pad(d, special=False), "needs 258 ids, and the model has 257"),
    "windows": (lambda d: change_config(write(d, QWEN3), use_sliding_window=True), "use_sliding_window True is not"),
}
REFUSED = DAMAGES | {str(fields): (partial(change_config, **fields), message) for fields, message in FIELDS}  # type: ignore


@pytest.mark.parametrize("case", REFUSED)
def test_directories_that_are_refused(case, tmp_path, refused):
    break_it, message = REFUSED[case]
    directory = write(tmp_path / "theirs")
    break_it(directory)
    error = refused(generate.main, ["--checkpoint", str(directory), "--device", "cpu"])
    assert re.search(message, error) and len(error) < 2000, error


HUGE = {name: 2**31 - 1 for name in ("num_hidden_layers", "max_position_embeddings", "vocab_size")}
HUGE |= {"layers": 9999, "context": 10**8}


@pytest.mark.parametrize("name, size", HUGE.items())
def test_huge_sizes_are_refused_before_the_model_is_allocated(name, size, tmp_path, monkeypatch):
    if name in ("layers", "context"):  # under our key
        save_pretrained(tmp_path, Llama(**SIZES, placement="post"), ByteTokenizer())
        own = json.loads((tmp_path / "config.json").read_text())["normal_llama"]
        change_config(tmp_path, normal_llama=own | {"model": own["model"] | {name: size}})
    else:
        change_config(write(tmp_path), **{name: size})
    monkeypatch.setattr(Llama, "load_state_dict", lambda *args, **options: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        load_pretrained(tmp_path)


def test_a_directory_in_shards_with_what_others_leave_in_it(tmp_path):
    """A buffer of old versions, fields that change nothing, and code, which is not run."""
    directory, marker = write(tmp_path / "theirs"), tmp_path / "marker"
    expected = load_pretrained(directory)[0]
    shard(directory, **{"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    code = {"AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None]}
    change_config(directory, torch_dtype="float32", is_causal=True, rope_interleaved=False, top_p=0.9, auto_map=code)
    (directory / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    loaded = load_pretrained(directory)[0]
    assert weight_hashes(directory)["sha256"] == {name: sha256(directory / name) for name in SHARDS}
    assert loaded.config == expected.config and not marker.exists()
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in expected.state_dict().items())


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_tokens_that_were_added_to_ours_and_all_its_files_are_kept(tmp_path, kind, capsys):
    """As in transformers, a tokenizer.json counts. A line names files that differ from it."""
    ours = ByteTokenizer() if kind == "bytes" else train_tokenizer(["hello you, and me\n"] * 99, 290)
    model = Llama(dataclasses.replace(LLAMA, vocab_size=ours.vocab_size + 1))
    save_pretrained(tmp_path / "ours", model, ours)
    (tmp_path / "ours/chat_template.jinja").write_text("kept")
    save_pretrained(tmp_path / "same", model, load_pretrained(tmp_path / "ours")[1])
    assert (tmp_path / "same/chat_template.jinja").read_text() == "kept"
    if kind == "sentencepiece":  # its model alone, beside weights of others
        others = shutil.copytree(tmp_path / "ours", tmp_path / "others")
        change_config(others, normal_llama=())
        (others / "tokenizer_config.json").unlink()
        ids = load_pretrained(others)[1].encode_prompt("hello you")
        assert ids == transformers.AutoTokenizer.from_pretrained(others)("hello you")["input_ids"]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    theirs.add_tokens(["lo y"])
    theirs.save_pretrained(tmp_path / "ours")
    for name in ("vocab.json", "added_tokens.json", "merges.txt", "chat_template.jinja"):
        (tmp_path / "ours" / name).write_text('{"zz": 9}')
    _, tokenizer = load_pretrained(tmp_path / "ours")
    ids = tokenizer.encode("hello you")
    assert ids == theirs("hello you")["input_ids"] and ours.vocab_size in ids
    assert tokenizer.decode(ids) == "hello you"
    assert capsys.readouterr().err.count(".json differs from the tokenizer in use: 'zz' is 9 there") == 2
    save_pretrained(tmp_path / "again", model, tokenizer)
    assert {*os.listdir(tmp_path / "ours")} == {*os.listdir(tmp_path / "again")}


@pytest.mark.parametrize("where", ["tokenizer_config", "special_tokens_map", "config", "generation_config"])
def test_the_end_of_a_document_is_named_in_any_of_four_files(where, tmp_path):
    directory = write(tmp_path / "theirs")
    pad(directory)
    (directory / "tokenizer_config.json").unlink()
    change_config(directory, eos_token_id=())
    path, of_model = directory / f"{where}.json", where.startswith(("config", "gen"))
    named = {"eos_token_id": [256, 5]} if of_model else {"eos_token": {"content": "</s>", "lstrip": False}}
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | named))
    _, tokenizer = load_pretrained(directory)
    assert tokenizer.end_of_document == 256 and tokenizer.ends == ({256, 5} if of_model else {256})


def test_every_norm_placement_and_recipe_is_saved_and_read_again(tmp_path):
    variants: list[dict[str, Any]] = [
        *({"norm": norm} for norm in sorted(KINDS)), *({"placement": name, "layers": 4} for name in PLACEMENTS),
        {"scaled_embedding": True}, {"embedding_scale": 2.0},
        {"norm": "layernorm", "norm_args": {"bias": False}}, {"norm": "batchnorm", "tie_embeddings": False},
        {"norm": "layernorm", "head_dim": 6}, {"heads": 3, "head_dim": 6},
        {"norm": "layernorm", "norm_args": {"elementwise_affine": False, "eps": 1e-3}},
        *({"recipe": names.split()[0]} for names in ROWS),
    ]  # fmt: skip
    expressed = []
    for number, variant in enumerate(variants):
        model, directory = Llama(configure(SIZES | variant)[0]), tmp_path / str(number)
        save_pretrained(directory, model, ByteTokenizer())
        loaded, _ = load_pretrained(directory)
        tied = loaded.lm_head.weight is loaded.embed_tokens.weight
        assert loaded.config == model.config and not loaded.training and tied == loaded.config.tie_embeddings
        assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
        if variant.get("placement") in ("residual", "siamese"):
            assert "model.norm.weight" in load_file(directory / "model.safetensors"), "the norm before the head"
        described = json.loads((directory / "config.json").read_text())
        assert described["model_type"] != "normal-llama" or "Hugging Face" in described["not_in_transformers"]
        if described["model_type"] != "normal-llama" and "recipe" not in variant:
            expressed.append(variant)
    with pytest.raises(ValueError, match="normal-llama"):
        transformers.AutoModelForCausalLM.from_pretrained(directory)  # the last
    expected: list[dict[str, Any]] = [{"norm": "layernorm"}, {"norm": "rmsnorm"}, {"placement": "pre", "layers": 4}]
    assert expressed == [*expected, {"placement": "sandwich", "layers": 4}, {"embedding_scale": 2.0}]


def test_what_is_as_we_wrote_it_is_not_translated_and_fields_of_others_count_more(tmp_path, monkeypatch):
    """config.json is read once. Directories of earlier commits have no checksum."""
    config = dataclasses.replace(LLAMA, dropout=0.25, norm_args={"cast_order": "llama"})
    save_pretrained(tmp_path, Llama(config), ByteTokenizer())
    read, where = list[Path](), "runtime.huggingface.directory"
    with monkeypatch.context() as patch:
        patch.setattr(f"{where}.read_json", lambda path, kind: read.__iadd__([path]) and read_json(path, kind))
        for name in ("from_theirs", "to_theirs"):
            patch.setattr(f"{where}.{name}", pytest.fail)
        assert load_pretrained(tmp_path)[0].config == config and read.count(tmp_path / "config.json") == 1
    own = json.loads((tmp_path / "config.json").read_text())["normal_llama"]
    change_config(tmp_path, normal_llama=own | {"model": own["model"] | {"norm_args": {"eps": 0.25}}})
    assert load_pretrained(tmp_path)[0].config == from_theirs(to_theirs(config))
    earlier = {name: value for name, value in own.items() if name != "sha256"}
    change_config(tmp_path, normal_llama=earlier)
    assert load_pretrained(tmp_path)[0].config == config
    for ours, eps in ((earlier, 0.25), (own, 0.5)):
        change_config(tmp_path, normal_llama=ours, rms_norm_eps=eps)
        changed = load_pretrained(tmp_path)[0].config
        assert changed.norm_args["eps"] == eps and changed == from_theirs(to_theirs(changed))


OF_OTHER_PARTS = ("sliding_window", "original_max_position_embeddings")
FAMILIES = [name for name in ARCHITECTURES if name not in ("llama", "qwen3", "olmo", "olmo2", "stablelm")]


def of_family(model_type: str) -> ModelConfig:
    options: dict[str, Any] = RECIPES[model_type.removesuffix("_text")] | ARCHITECTURES[model_type].ours
    return ModelConfig(**SIZES | options | {"model_type": model_type})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fields_of_a_family_are_computed_or_refused_by_their_names(model_type):
    """All that transformers has for it, at other values than ours."""
    theirs, known = to_theirs(of_family(model_type)), {*SIZES_OF_THEIRS, *OTHERS.split(), *OF_OTHER_PARTS}
    computed = from_theirs(theirs), layout(theirs, from_theirs(theirs))
    for name in transformers.AutoConfig.for_model(model_type).to_dict().keys() - known:
        for other in (True, 0.5, "tanh"):
            try:
                config = from_theirs(theirs | {name: other})
                same = (config, layout(theirs | {name: other}, config)) == computed
                assert not same or other == theirs.get(name, False) or name.endswith("_dropout"), (name, other)
            except ValueError as error:
                assert name in str(error), (name, error)


MIXED = ["full_attention", "sliding_attention"]
ROPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
OTHER_LAYERS = r"layer_types \['sliding_attention'\] is not supported"
WINDOWS: list[tuple[str, dict[str, Any], str]] = [  # "" if it is read
    ("mistral", {"sliding_window": 15}, "sliding_window 15 is not supported; null and 16 or more are"),
    ("mistral", {"sliding_window": (), "max_position_embeddings": 8192}, "sliding_window 4096 is not supported"),
    ("gemma2", {"sliding_window": 8, "layer_types": None}, "sliding_window 8 is not supported"),
    ("mistral", {"sliding_window": 16}, ""),
    ("gemma3_text", {"rope_parameters": ROPES}, ""),
    ("gemma3_text", {"rope_parameters": ROPES, "rope_scaling": {"rope_type": "default"}}, ""),
    ("olmo3", {"rope_parameters": {"rope_theta": 500.0}}, ""),
    ("glm4", {"rope_parameters": None, "partial_rotary_factor": None}, ""),
    ("gemma3_text", {"layer_types": MIXED}, OTHER_LAYERS),
    ("olmo3", {"layer_types": None}, OTHER_LAYERS),
    ("exaone4", {"sliding_window": 16}, "sliding_window 16 is not supported, only None"),
    ("mistral", {"layer_types": MIXED}, OTHER_LAYERS),
]


@pytest.mark.parametrize("model_type, fields, message", WINDOWS)
def test_windows_shorter_than_the_context_are_refused(model_type, fields, message):
    theirs = to_theirs(of_family(model_type)) | fields
    theirs = {name: value for name, value in theirs.items() if value != ()}
    if message:
        with pytest.raises(ValueError, match=message):
            from_theirs(theirs)
    else:
        config = from_theirs(theirs)
        rope = transformers.AutoConfig.for_model(**theirs).rope_parameters
        rope = rope.get("full_attention", rope)
        assert (config.rope_theta, config.rotary_fraction) == (rope["rope_theta"], rope.get("partial_rotary_factor", 1))


@pytest.mark.parametrize("model_type, config", [("llama", LLAMA), *((name, of_family(name)) for name in FAMILIES)])
def test_missing_fields_have_the_defaults_of_transformers(model_type, config):
    theirs = to_theirs(config)
    assert theirs["rms_norm_eps"] == Llama(config).get_submodule("layers.0.attention_residual.norm").eps
    default = transformers.AutoConfig.for_model(model_type)
    for name in ("rms_norm_eps", "layer_norm_eps", "rope_theta", "tie_word_embeddings"):
        if name in theirs:
            rope = default.rope_parameters.get("full_attention", default.rope_parameters)
            expected = rope[name] if name == "rope_theta" else getattr(default, name)
            without = {field: value for field, value in theirs.items() if field not in (name, "rope_parameters")}
            assert from_theirs(without) == from_theirs(without | {name: expected}), name
