"""Configuration: one flag per field, the precedence of flags, and a one-line error for each invalid value."""

import dataclasses
import re
from typing import Any

import pytest
import torch

import train
from config import (
    FIELDS,
    PRESETS,
    ROPE_SCALING,
    ModelConfig,
    Parser,
    TrainConfig,
    add_flags,
    check_fields,
    configs_from,
    to_flags,
)
from model import Llama
from norms import KINDS


def parse(flags: str, device: str = "cpu", of_run: dict[str, Any] | None = None) -> tuple[ModelConfig, TrainConfig]:
    parser = Parser(prog="train.py")
    add_flags(parser)
    return configs_from(parser.parse_args(flags.split()), device, of_run)


def fields_of(model: ModelConfig, training: TrainConfig) -> dict[str, Any]:
    return dataclasses.asdict(model) | dataclasses.asdict(training)


def flag(field: dataclasses.Field) -> str:
    return "--norm-arg" if field.name == "norm_args" else "--" + field.name.replace("_", "-")


# --- bad input -------------------------------------------------------------------------------------------------------

SIZES = [
    *("dim", "layers", "heads", "kv-heads", "head-dim", "hidden-dim", "context", "vocab-size"),
    *("steps", "batch-size", "micro-batch-size", "eval-every", "save-every", "keep"),
]
SCALING = " --".join(f"rope-scaling {name}={value}" for name, value in zip(ROPE_SCALING, (8, 1, 4, 99), strict=True))
BAD_VALUES = {
    "--dim 100 --heads 3": "--dim 100 is not divisible by --heads 3",
    "--dim 30 --heads 2": "--head-dim 15 (by default --dim / --heads) is odd: RoPE rotates pairs of features",
    "--head-dim 8 --rotary-fraction 0.4": "--rotary-fraction 0.4 of --head-dim 8 must be an even number of features",
    "--head-dim 8 --rotary-fraction nan": "--rotary-fraction nan of --head-dim 8 must be an even number of features",
    "--context 1": "--context must be at least 2, not 1",
    "--rope-scaling factor=8": "--rope-scaling takes all of factor, low_freq_factor, high_freq_factor, original_max",
    "--rope-scaling factor=many": "--rope-scaling takes key=number, not 'factor=many'",
    f"--{SCALING.replace('=8', '=nan')}": "positive numbers, low below high",
    f"--{SCALING.replace('r=1', 'r=4')}": "positive numbers, low below high",
    "--embedding-scale 0": "--embedding-scale must be a positive number, not 0.0",
    "--tokenizer pretrained": "--tokenizer pretrained needs --init-from",
    "--heads 4 --kv-heads 3": "--heads 4 is not divisible by --kv-heads 3",
    "--batch-size 12 --micro-batch-size 5": "--batch-size 12 is not divisible by --micro-batch-size 5",
    **{f"--lr {value}": f"--lr must be a positive number, not {float(value)}" for value in ("0", "nan")},
    **{f"--dropout {value}": f"--dropout must be at least 0 and below 1, not {float(value)}" for value in ("1", "nan")},
    **{f"--{name} 0": f"--{name} must be at least 1, not 0" for name in SIZES},
    **{f"--{name} {10**20}": f"--{name} must be at most 2147483647, not {10**20}" for name in SIZES},
    "--data=": "--data must not be empty; name python, shakespeare, or a path",
    "--cache-dir=": "--cache-dir must not be empty",
    **{f"--{name} -1": f"--{name} must be 0 or more and finite, not -1" for name in ("warmup", "seed")},
    "--weight-decay nan": "--weight-decay must be 0 or more and finite, not nan",
    "--clip inf": "--clip must be 0 or more and finite, not inf",
    **{f"--min-lr {value}": f"--min-lr must be from 0 to --lr, 0.015, not {value}" for value in ("-0.1", "0.1", "nan")},
    "--momentum 1": "--momentum must be at least 0 and below 1, not 1.0",
    "--rope-theta 0": "--rope-theta must be a positive number, not 0.0",
    "--seed 9223372036854775808": "--seed must be below 2**63",
    "--norm-arg eps": "--norm-arg takes key=value, not 'eps'",
    "--norm-arg epsilon=1": "norm 'rmsnorm' has no argument 'epsilon'; it takes eps",
    "--norm-arg eps=small": "--norm-arg eps takes a number, not 'small'",
    "--norm-arg eps=0": "eps of a norm must be positive and finite, not 0.0",
    "--norm-arg cast_order=first": "--norm-arg cast_order takes fp32 or llama, not 'first'",
    "--norm layernorm --norm-arg bias=maybe": "--norm-arg bias takes true or false, not 'maybe'",
    "--tokenizer bytes --vocab-size 1000": "--vocab-size 1000: --tokenizer bytes has 257 ids",
}


@pytest.mark.parametrize("flags, message", BAD_VALUES.items())
def test_invalid_value_gives_a_one_line_error(flags, message):
    with pytest.raises(ValueError) as excinfo:
        parse(flags)
    assert message in str(excinfo.value) and "\n" not in str(excinfo.value)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--norm batch", f"argument --norm: invalid choice: batch (choose from {', '.join(KINDS)})"),
        ("--dim wide", "argument --dim: invalid int value: wide"),
        ("--learning-rate 3", "unrecognized arguments: --learning-rate 3; did you mean --lr?"),
        ("--n_layer=6", "unrecognized arguments: --n_layer=6; did you mean --layers?"),
        ("--no-comiple", "unrecognized arguments: --no-comiple; did you mean --no-compile?"),
        ("--laers 3 --stesp 4", "unrecognized arguments: --laers 3 --stesp 4; did you mean --layers and --steps?"),
        ("lr", "unrecognized arguments: lr"),
    ],
)
def test_argparse_error_is_one_line_with_exit_code_2(flags, message, refused):
    # quoting differs between Python versions
    assert refused(train.main, flags.split()).replace("'", "") == f"error: {message}\n"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"dim": "wide"}, "dim must be of type int, not 'wide'"),
        ({"dim": None}, "dim must be of type int, not None"),
        ({"layers": 2.0}, "layers must be of type int, not 2.0"),
        ({"layers": True}, "layers must be of type int, not True"),
        ({"rope_scaling": {"factor": "8"}}, "rope_scaling must be of type dict, not {'factor': '8'}"),
        ({"tie_embeddings": 0}, "tie_embeddings must be of type bool, not 0"),
        ({"norm_args": [1]}, "norm_args must be of type dict, not [1]"),
        ({"width": 3}, "'width' is not a field of this version"),
        ({"lr": True}, "lr must be of type float, not True"),
        ({"data": ["python", 3]}, "data must be of type list, not ['python', 3]"),
    ],
)
def test_fields_of_a_file_have_their_types(fields, message):
    with pytest.raises(ValueError, match=re.escape(f"run.json: {message}")):
        check_fields(fields, "run.json")
    check_fields({"kv_heads": None, "warmup": None, "lr": 1, "norm_args": {"eps": 1}}, "run.json")


# A run whose options differ from their defaults, so that a reset shows. The warmup is the default for 100 steps.
MODEL: dict[str, Any] = dict(
    norm="layernorm", norm_args={"bias": False}, qk_norm="full", dim=64, layers=2, heads=4, kv_heads=2, head_dim=12,
    hidden_dim=40, context=99, vocab_size=300, rope_theta=500.0, rotary_fraction=0.5, embedding_scale=3.0,
    tie_embeddings=False, scaled_embedding=True, dropout=0.3, init="normal", depth_scaled_init=False,
)  # fmt: skip
TRAINING: dict[str, Any] = dict(
    data=["shakespeare"], steps=100, warmup=5, batch_size=12, micro_batch_size=2, lr=0.3, schedule="cosine",
    min_lr=0.03, weight_decay=0.3, momentum=0.3, clip=3.0, seed=3, device="cpu", dtype="float32", tf32=True,
    deterministic=True, recompute=True, compile=False, shard=True, eval_every=3, eval_tokens=3,
    save_every=3, keep=3, watch=3, log="wandb", out="out", cache_dir="elsewhere",
)  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "--dim 256": {"dim": 256, "hidden_dim": 704, "head_dim": 64},
    "--heads 8": {"heads": 8, "head_dim": 8},
    "--norm rmsnorm": {"norm": "rmsnorm", "norm_args": {}},
    "--placement deepnorm": {"placement": "deepnorm", "init": "xavier"},
    "--tokenizer bytes": {"tokenizer": "bytes", "vocab_size": 257},
    "--steps 200": {"steps": 200, "warmup": 10},
    "--batch-size 9": {"batch_size": 9, "micro_batch_size": 9},
    "--batch-size 8": {"batch_size": 8},
    "--init xavier --qk-norm head": {"init": "xavier", "qk_norm": "head"},
    "--optimizer adamw --lr 0.1 --dtype float16": {"optimizer": "adamw", "lr": 0.1, "dtype": "float16"},
}


@pytest.mark.parametrize("flags, changed", CHANGES.items())
def test_an_option_changes_what_follows_from_it_and_nothing_else(flags, changed):
    before = fields_of(ModelConfig(**MODEL), TrainConfig(**TRAINING))
    after = fields_of(*parse(flags, of_run=before))
    assert {name: value for name, value in after.items() if value != before[name]} == changed


@pytest.mark.parametrize("chosen", [{"warmup": 7, "kv_heads": 1, "init": "xavier"}, {}])
def test_what_was_chosen_is_kept_and_a_default_follows(chosen):
    before = fields_of(ModelConfig(heads=4), TrainConfig(steps=100)) | chosen
    after = fields_of(*parse("--steps 200 --heads 2 --placement post", of_run=before))
    expected = {"warmup": 10, "kv_heads": 2, "init": "normal"} | chosen
    assert {name: after[name] for name in expected} == expected
    before = fields_of(ModelConfig(placement="deepnorm"), TrainConfig())
    assert parse("--placement post --warmup 3", of_run=before)[0].init == "normal"


def test_flags_come_before_the_run_and_the_run_before_defaults():
    model, training = ModelConfig(dim=64, norm_args={"eps": 0.5}), TrainConfig(steps=77, lr=0.25)
    before = fields_of(model, training)
    assert parse("", of_run=before) == (model, training)
    changed_model, changed = parse("--lr 0.125 --norm-arg eps=0.75", of_run=before)
    assert changed_model == dataclasses.replace(model, norm_args={"eps": 0.75})
    assert changed == dataclasses.replace(training, lr=0.125)
    with pytest.raises(ValueError, match="use either --preset or --config, not both"):
        parse("--config run.json --preset 1b", of_run=before)
    small = PRESETS["small"]
    assert (parse("--preset small --steps 9")[1].steps, parse("--preset small")[0].dim) == (9, small["dim"])
    assert parse("--preset 124m --dim 768 --batch-size 480") == parse("--preset 124m")
    assert parse("--preset 124m --tokenizer bytes")[0].vocab_size == 257
    assert parse("--data a --data b c")[1].data == ["a", "b", "c"]


# --- fields, flags, presets ------------------------------------------------------------------------------------------


def test_every_field_has_a_flag_in_the_help(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert {name for name, field in FIELDS.items() if f" {flag(field)}" not in text} == {"trained_context"}
    assert len(FIELDS) == len(dataclasses.fields(ModelConfig)) + len(dataclasses.fields(TrainConfig))


def test_every_flag_sets_its_field():
    """Of a configuration that differs from the default in every field."""
    model = ModelConfig(**MODEL | {"rope_scaling": dict(zip(ROPE_SCALING, (8.0, 1.0, 4.0, 6.0), strict=True))})
    model = dataclasses.replace(model, placement="sandwich")
    training = TrainConfig(**TRAINING | {"optimizer": "adamw", "init_from": "base", "tokenizer": "pretrained"})
    flags = to_flags(fields_of(model, training))
    assert parse(" ".join(flags)) == (model, training)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_repeat_no_defaults(preset):
    model, training = parse(f"--preset {preset}")
    got = dataclasses.asdict(model) | dataclasses.asdict(training)
    for name, value in PRESETS[preset].items():
        assert got[name] == value
        assert value != FIELDS[name].default, f"{name} already has this default"


def test_derived_defaults():
    assert ModelConfig().kv_heads == ModelConfig().heads
    for dim in (128, 256, 384, 768):
        hidden = ModelConfig(dim=dim, heads=4).hidden_dim
        assert hidden % 32 == 0 and 0 <= hidden - dim * 8 / 3 < 32
    assert ModelConfig(dim=4096, heads=32).hidden_dim == 10944
    assert TrainConfig(batch_size=24).micro_batch_size == 24
    assert TrainConfig(steps=1000).warmup == 50
    assert parse("--tokenizer bytes")[0].vocab_size == 257


def test_default_preset_depends_on_the_device():
    """That of a GPU sees its corpus, of three million tokens, eleven times, where dropout of 0.2 helps."""
    small = PRESETS["small"]
    assert small["steps"] * small["batch_size"] * small["context"] < 11 * 3e6 and small["dropout"] == 0.2
    assert parse("")[0].dim == ModelConfig().dim
    assert parse("", "cuda")[0].dim == parse("", "mps")[0].dim == PRESETS["small"]["dim"]
    assert parse("--preset tiny", "cuda")[0].dim == ModelConfig().dim


def test_config_weights_is_the_number_of_parameters():
    for model_config in (ModelConfig(norm="none"), ModelConfig(norm="none", heads=8, kv_heads=2, tie_embeddings=False)):
        with torch.device("meta"):
            assert model_config.weights == sum(weight.numel() for weight in Llama(model_config).parameters())
