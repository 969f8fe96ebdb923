"""What follows from what was asked, for a new run and for one that goes on, and errors in one line."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from config import PRESETS, ROPE_SCALING, ModelConfig, changed_options, check_fields, combine, configure, flag_name
from generate import Options
from norms import KINDS
from norms.placement import PLACEMENTS
from recipes import RECIPES
from runtime.flags import SYNONYMS, read_train
from runtime.run import fields_of, read_config_file, resolve

SIZES = [
    *("dim", "heads", "kv-heads", "head-dim", "hidden-dim", "context", "vocab-size"),
    *("steps", "batch-size", "micro-batch-size", "eval-every", "save-every", "keep"),
]
SCALING = " --".join(f"rope-scaling {name}={value}" for name, value in zip(ROPE_SCALING, (8, 1, 4, 99), strict=True))
BAD_VALUES = {
    "--dim 100 --heads 3": "--dim 100 is not divisible by --heads 3",
    "--dim 30 --heads 2": "--head-dim 15 (by default --dim / --heads) is odd: RoPE rotates pairs of features",
    "--head-dim 8 --rotary-fraction 0.4": "--rotary-fraction 0.4 of --head-dim 8 must be an even number of features",
    "--context 1": "--context must be at least 2, not 1",
    "--rope-scaling factor=8": "--rope-scaling takes all of factor, low_freq_factor, high_freq_factor, original_max",
    **{f"--{SCALING.replace('=8', value)}": "numbers, low below high" for value in ("=nan", "=many", "=true")},
    f"--{SCALING.replace('r=1', 'r=4')}": "positive numbers, low below high",
    "--embedding-scale wide": "--embedding-scale must be a positive number, not wide",
    **{f"--{name} -1": f"--{name} must be at least 0, not -1.0" for name in ("attention-cap", "logit-cap", "z-loss")},
    "--qk-norm-after-rope": "--qk-norm-after-rope needs --qk-norm, and not --placement ngpt",
    "--qk-norm-after-rope --qk-norm head --placement ngpt": "needs --qk-norm, and not --placement ngpt",
    "--qk-norm-arg eps=1": "--qk-norm-arg needs a norm on queries and keys, as --qk-norm head",
    "--gate-activation softplus": "--gate-activation softplus needs --attention-gate head or element",
    "--norm groupnorm --inner-norm --hidden-dim 50 --norm-arg groups=4": "must divide the 50 features",
    "--tokenizer pretrained": "--tokenizer pretrained needs --init-from",
    "--batch-size 12 --micro-batch-size 5": "--batch-size 12 is not divisible by --micro-batch-size 5",
    "--preset 1b --heads 4 --kv-heads 8": "--heads 4 is not divisible by --kv-heads 8",
    **{f"--lr {value}": f"--lr must be above 0, not {float(value)}" for value in ("0", "nan")},
    "--dropout 1": "--dropout must be below 1, not 1.0",
    "--dropout nan": "--dropout must be at least 0, not nan",
    **{f"--{name} 0": f"--{name} must be at least 1, not 0" for name in SIZES},
    **{f"--{name} {10**20}": f"--{name} must be at most 2147483647, not {10**20}" for name in SIZES},
    "--layers 0": "--layers must be at least 1, not 0",
    "--layers 4097": "--layers must be at most 4096, not 4097",
    **{f"--{name}=": f"--{name} must not be empty" for name in ("data", "val-data", "cache-dir")},
    **{f"--{name} -1": f"--{name} must be at least 0, not -1" for name in ("warmup", "seed")},
    "--weight-decay nan": "--weight-decay must be at least 0, not nan",
    "--clip inf": "--clip must be finite, not inf",
    "--lr 1e39": "--lr must be below 1e+36, not 1e+39",
    "--min-lr 0.1": "--min-lr 0.1 is above the learning rate, 0.015; --lr sets it",
    "--min-lr 0.01 --dim 256": "--min-lr 0.01 is above the learning rate, 0.00776; --lr sets it",
    "--warmup 20 --steps 20": "--warmup 20 is too long: with --steps 20 and --schedule linear it can be at most 19",
    "--warmup 18 --steps 22 --schedule wsd": "with --steps 22 and --schedule wsd it can be at most 17",
    "--momentum 1": "--momentum must be below 1, not 1.0",
    "--rope-theta 0": "--rope-theta must be above 0, not 0.0",
    "--seed 9223372036854775808": "--seed must be below 9223372036854775808",
    **{f"--norm batchnorm --norm-arg momentum={m}": "momentum of batchnorm must be above 0" for m in (0, 1.5)},
    **{f"--norm prmsnorm --norm-arg p={p}": "must be above 0 and at most 1" for p in (0, 1.01)},
    "--norm dyt --norm-arg alpha=0": "alpha and attention_ratio of dyt must be positive, not 0 and 1.0",
    "--norm derf --norm-arg alpha=-inf": "argument alpha of norm 'derf' is beyond float32: -inf",
    **{f"--norm-arg eps={eps}": "argument eps of norm 'rmsnorm' is beyond float32: " for eps in ("1e39", "1e-39")},
    "--norm derf --norm-arg attention_ratio=0": "alpha and attention_ratio of derf must be positive, not 0.5 and 0",
    **{f"--norm groupnorm --norm-arg groups={n}": "128 features into groups of at least 8, not" for n in (0, 3, 32)},
    "--norm none --placement post": "--norm none is not supported with --placement post; choose ",
    "--placement minimax --placement-arg beta=nan": "argument beta of placement 'minimax' is beyond float32: nan",
    "--placement mhc --placement-arg streams=0": "streams must be at least 1, not 0",
    "--placement attnres-block --placement-arg layers=0": "layers must be at least 1, not 0",
    **{f"--placement ngpt {flags}": "ngpt has a built-in norm" for flags in ("--norm layernorm", "--norm-arg eps=1")},
    "--norm layernorm --norm-arg bias=maybe": "argument bias of norm 'layernorm' takes true or false, not 'maybe'",
    "--tokenizer bytes --vocab-size 1000": "--vocab-size 1000: --tokenizer bytes has 257 ids",
}


@pytest.mark.parametrize("flags, message", BAD_VALUES.items())
def test_invalid_value_gives_a_one_line_error(flags, message):
    with pytest.raises(ValueError) as excinfo:
        configure(read_train(flags.split()))
    assert message in str(excinfo.value) and "\n" not in str(excinfo.value)


def test_fields_of_a_file_and_values_from_python_have_their_types():
    for name, value, kind in (("layers", 2.0, "int"), ("lr", True, "float"), ("data", [3], "list")):
        with pytest.raises(ValueError, match=re.escape(f"run.json: {name} must be of type {kind}, not {value!r}")):
            check_fields({name: value}, "run.json")
    with pytest.raises(ValueError, match=r"run\.json: 'width' \(3\) is not an option of this version"):
        check_fields({"width": 3}, "run.json")
    check_fields({"kv_heads": None, "warmup": None, "lr": 1, "norm_args": {"eps": 1}}, "run.json")
    wrong: dict[str, Any] = {"v_norm": "false", "layers": True, "dropout": "0.1", "dim": None}
    for name in wrong:
        with pytest.raises(ValueError, match=rf"{flag_name(name)} must be of type \w+, not {wrong[name]!r}"):
            ModelConfig(**{name: wrong[name]})


# Flags of a new run, and how it differs from one of the preset alone.
NEW: dict[str, dict[str, Any]] = {
    "--dim 256": {"dim": 256, "head_dim": 128, "hidden_dim": 704, "lr": 0.00776},
    "--dim 320": {"dim": 320, "head_dim": 160, "hidden_dim": 864, "lr": 0.00776},
    "--dim 256 --lr 0.015": {"dim": 256, "head_dim": 128, "hidden_dim": 704},
    "--dim 256 --optimizer adamw": {"dim": 256, "head_dim": 128, "hidden_dim": 704, "optimizer": "adamw"},
    "--steps 1500": {"steps": 1500, "warmup": 75, "lr": 0.012},
    "--dim 64 --steps 9000": {"dim": 64, "head_dim": 32, "hidden_dim": 192, "steps": 9000, "warmup": 450, "lr": 0.013},
    "--batch-size 20": {"batch_size": 20, "micro_batch_size": 20},
    "--steps 100 --batch-size 3": {"steps": 100, "warmup": 5, "batch_size": 3, "micro_batch_size": 3, "lr": 0.0172},
    "--heads 4": {"heads": 4, "kv_heads": 4, "head_dim": 32},
    "--placement deepnorm": {"placement": "deepnorm", "init": "xavier", "depth_scaled_init": False},
    "--placement deepnorm --init normal": {"placement": "deepnorm", "depth_scaled_init": False},
    "--preset 1b --dim 1024 --heads 16": {"dim": 1024, "heads": 16, "hidden_dim": 2752},
    "--preset 1b --dim 1024 --hidden-dim 8192": {"dim": 1024, "head_dim": 32},
    "--preset 1b --heads 4": {"heads": 4, "kv_heads": 4, "head_dim": 512},
    "--preset small --batch-size 48": {"batch_size": 48, "micro_batch_size": 48},
    "--preset 124m --norm batchnorm": {"norm": "batchnorm", "micro_batch_size": 480},
    "--mlp plain": {"mlp": "plain", "hidden_dim": 512},
    "--recipe olmo2 --placement pre --hidden-dim 64": {"qk_norm": "full", "hidden_dim": 64},
    "--recipe llama4 --norm dyt": {"norm": "dyt", "qk_norm": "head"},
    "--recipe llama4 --qk-norm none": {},
    "--recipe glm5_next --norm layernorm": {"placement": "mhc", "placement_args": {"end": "mean"}, "norm": "layernorm"},
    "--recipe llama4 --qk-norm full": {"qk_norm": "full", "qk_norm_args": {"elementwise_affine": False}},
    "--recipe laguna --attention-gate none": {"qk_norm": "head"},
}
# Flags of a run, flags of one that continues it or takes its options, and how the two differ.
LATER: dict[tuple[str, str], dict[str, Any]] = {
    ("--hidden-dim 352", "--dim 256"): {"dim": 256, "head_dim": 128, "lr": 0.00776},
    ("--dim 256 --lr 0.02", "--dim 128"): {"dim": 128, "head_dim": 64, "hidden_dim": 352},
    ("--preset 1b", "--dim 1024"): {"dim": 1024, "head_dim": 32, "hidden_dim": 2752},
    ("--heads 4 --kv-heads 2", "--heads 8"): {"heads": 8, "head_dim": 16},
    ("--heads 4 --head-dim 12", "--heads 8"): {"heads": 8, "kv_heads": 8},
    ("--warmup 25", "--steps 200"): {"steps": 200, "lr": 0.0172},
    ("--placement deepnorm", "--placement post"): {"placement": "post", "init": "normal", "depth_scaled_init": True},
    ("--placement deepnorm --init xavier", "--placement post"): {"placement": "post"},
    ("--norm layernorm --norm-arg bias=false", "--norm dyt"): {"norm": "dyt", "norm_args": {}},
    ("--norm layernorm --norm-arg bias=false", "--norm-arg eps=1"): {"norm_args": {"bias": False, "eps": 1}},
    ("--embedding-scale sqrt --lr 0.1", "--dim 64 --head-dim 64 --hidden-dim 352"): {"embedding_scale": 8.0, "dim": 64},
    ("--recipe olmo2", "--recipe exaone4 --lr 0.1"): {"qk_norm": "head", "lr": 0.1},
    ("--recipe hunyuan_v1_dense", "--qk-norm none"): {"qk_norm": "none", "qk_norm_after_rope": False},
    ("--recipe olmo", "--norm-arg eps=0.5"): {"norm_args": {"elementwise_affine": False, "eps": 0.5}},
    ("--placement post", "--recipe olmo2"): {"qk_norm": "full"},
    ("--preset small", "--batch-size 16"): {"batch_size": 16, "micro_batch_size": 16},
    ("--preset small --micro-batch-size 8", "--batch-size 16"): {"batch_size": 16},
    ("--tokenizer bytes", "--tokenizer sentencepiece"): {"tokenizer": "sentencepiece", "vocab_size": 2048},
}
HERE = {"device": "cpu", "dtype": "float32", "compile": False}


def run_of(flags: str = "", previous: dict[str, Any] | None = None, **decided: Any) -> dict[str, Any]:
    """The options of the run.json of a run, which may continue another. `decided` replaces what was resolved."""
    asked = read_train(flags.split())
    everything, model, training, *_ = resolve(asked if previous else HERE | asked, previous)
    resolved = fields_of(model, training) | decided
    return json.loads(json.dumps({"asked": everything, "resolved": resolved, "imports": []}))


def options(flags: str = "", previous: dict[str, Any] | None = None) -> dict[str, Any]:
    return run_of(flags, previous)["resolved"]


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if before[name] != value}


@pytest.mark.parametrize("flags, expected", NEW.items())
def test_what_follows_from_a_preset_and_flags(flags, expected):
    """What was asked for never gives way, and run.json has it, with the preset and the recipe."""
    run, asked = run_of(flags), {"preset": "tiny"} | HERE | read_train(flags.split())
    preset, named = asked["preset"], {name: asked[name] for name in ("preset", "recipe") if name in asked}
    assert changes(options(f"--preset {preset}"), run["resolved"]) == expected
    assert run["asked"] == asked and (asked | run["resolved"]) == run["resolved"] | named


@pytest.mark.parametrize("flags, expected", LATER.items(), ids=" → ".join)
def test_an_option_changes_what_follows_from_it_and_nothing_else(flags, expected):
    run = run_of(flags[0])
    assert options("", run) == run["resolved"]
    assert changes(run["resolved"], options(flags[1], run)) == expected


def test_presets_defaults_and_synonyms_are_as_recorded(kept):
    """Those of presets, generate.py, norms and placements. GPUs with less memory have smaller micro-batches."""
    found = {name: fields_of(*configure({"preset": name})) for name in PRESETS}
    found["generate.py"] = dataclasses.asdict(Options())
    made: list[tuple[str, Any]] = [*KINDS.items(), *((name, each.connection) for name, each in PLACEMENTS.items())]
    arguments = {name: inspect.signature(each).parameters for name, each in made if each.__module__.startswith("norms")}
    found["arguments"] = {
        f"{name}.{argument}": each.default
        for name, parameters in arguments.items() for argument, each in parameters.items()
        if each.default not in ("", each.empty)
    }  # fmt: skip
    kept(Path(__file__).with_name("options.json"), found | {"synonyms": SYNONYMS})
    for memory, size in ((13e9, 64), (11e9, 32), (5e9, 16)):
        assert configure({"preset": "small"}, memory=memory)[1].micro_batch_size == size


def test_flags_come_before_the_run_and_the_run_before_defaults():
    """Also if the run itself was continued with other flags: all of them are in its run.json."""
    for first, warmup in (("", 15), ("--warmup 25", 25)):
        run = run_of("--steps 200", run_of(first))
        after = options("--steps 300", run)
        assert (run["asked"]["steps"], after["steps"], after["warmup"]) == (200, 300, warmup)
    assert options("--preset small --steps 9")["steps"] == 9 and options("--layers 9")["lr"] == 0.015
    assert combine({"lr": 1.0, "steps": 3}, {"lr": 2.0}) == {"lr": 2.0, "steps": 3}
    with pytest.raises(ValueError, match="use either --preset or --config, not both"):
        read_config_file({"config": "run.json", "preset": "1b"})


def test_a_changed_default_or_an_unknown_option_does_not_change_what_was_resolved():
    """This run has values that do not follow from what it asked for, and lacks an option of today."""
    run = run_of("", lr=0.3, hidden_dim=96, vocab_size=300, warmup=3, init="xavier", micro_batch_size=2)
    del run["resolved"]["min_lr"]
    assert options("", run) == run["resolved"] | {"min_lr": 0.0}
    assert options("--layers 2 --clip 3", run) == run["resolved"] | {"min_lr": 0.0, "layers": 2, "clip": 3.0}
    after = options("--steps 200 --lr 0.015", run)
    assert (after["warmup"], after["lr"], after["hidden_dim"]) == (10, 0.015, 96)
    del run["resolved"]["norm"]
    asked = {"norm": "dyt", "seed": 5, "batch_size": 16, "order": "epochs", "optimizer": "adamw", "min_lr": 0.001}
    changed, fixed = changed_options(run["resolved"], *configure(asked))
    assert "--min-lr 0.0 -> 0.001" in changed and "--norm rmsnorm, not dyt" in fixed
    assert {flag_name(name) for name in asked} - {line.split()[0] for line in fixed} == {"--min-lr"}


def test_a_run_that_goes_on_has_the_rate_that_it_had():
    """Of 5a132b0, also with a --min-lr above the rate that a new run of these sizes has."""
    run = run_of("--dim 256", lr=0.015, min_lr=0.01)
    run["asked"]["min_lr"] = 0.01
    for flags, lr in (("", 0.015), ("--steps 1500 --clip 2", 0.015), ("--lr 0.02", 0.02)):
        assert resolve(read_train(flags.split()), run, continues=True)[2].lr == lr


def test_another_machine_does_not_change_a_run(monkeypatch):
    """Unless it lacks what the run used, or a flag asks."""
    monkeypatch.setattr("machine.device.fast_bfloat16", lambda: False)
    run = run_of("", dtype="bfloat16")
    assert options("", run)["dtype"] == options("--steps 9", run)["dtype"] == "bfloat16"
    assert [options(f"--dtype {name}", run)["dtype"] for name in ("auto", "float16")] == ["float32", "float16"]
    run = run_of("", device="cuda:99")
    assert changes(run["resolved"], options("", run)) == {"device": "cpu"}
    run["asked"]["device"] = "cuda:99"
    assert options("--device cpu", run)["device"] == "cpu"
    for flags in ("", "--device cuda:99"):
        with pytest.raises(ValueError, match="--device cuda:99: "):
            options(flags, run)
    monkeypatch.setattr("runtime.run.pick_device", torch.device)
    monkeypatch.setattr("torch.mps.recommended_max_memory", lambda: 14 << 30)
    assert options("--preset small --device mps").items() >= {"device": "mps", "micro_batch_size": 32}.items()
    monkeypatch.setattr("runtime.run.has_device", lambda name: True)
    assert options("", run_of(device="mps"))["device"] == "mps"


def test_a_pretrained_model_comes_after_the_preset_and_flags_may_repeat_it():
    sizes: dict[str, Any] = dict(dim=64, kv_heads=1, hidden_dim=96, context=128)
    base = ModelConfig(norm="layernorm", norm_args={"bias": False}, **sizes)
    pretrained = dataclasses.asdict(base) | {"tokenizer": "pretrained"}
    asked = {"preset": "1b", "norm": "layernorm", "dim": 64, "init_from": "base"}
    model, training = configure(asked, pretrained)
    assert model == base and (training.tokenizer, training.optimizer) == ("pretrained", "adamw")
    for context, trained in ((32, 128), (256, None)):
        model, _ = configure(asked | {"context": context, "dropout": 0.5}, pretrained)
        expected: dict[str, Any] = {"context": context, "trained_context": trained, "dropout": 0.5}
        assert model == dataclasses.replace(base, **expected)
    for context in (64, 128, 256):  # the model had more before it was fine-tuned
        model, _ = configure(asked | {"context": context}, pretrained | {"trained_context": 512})
        assert (model.context, model.trained_context) == (context, 512)
    for change in ({"heads": 8}, {"tokenizer": "bytes"}, {"norm": "rmsnorm"}, {"norm_args": {"eps": 0.5}}):
        with pytest.raises(ValueError, match=r"contradicts --init-from, which has .*; leave it out"):
            configure(asked | change, pretrained)


def test_a_recipe_may_repeat_that_of_a_pretrained_model():
    """And what would turn off a part of it is an error."""
    for recipe in RECIPES:
        base, _ = configure({"recipe": recipe, "dim": 64, "layers": 2})
        pretrained = dataclasses.asdict(base) | {"tokenizer": "pretrained"}
        for asked in ({"recipe": recipe, "init_from": "base"}, {"init_from": "base"}):
            assert configure(asked, pretrained)[0] == base
        for name in {"qk_norm", "attention_gate"} & {each for each in RECIPES[recipe] if pretrained[each] != "none"}:
            with pytest.raises(ValueError, match=f"{flag_name(name)} none contradicts --init-from"):
                configure({name: "none", "init_from": "base"}, pretrained)
        for other in {"llama", "qwen3", "gemma2"} if recipe == "gemma3" else ():
            with pytest.raises(ValueError, match="contradicts --init-from"):
                configure({"recipe": other}, pretrained)
