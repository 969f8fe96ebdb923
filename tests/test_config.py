"""Configuration: one flag per field, the precedence of flags, and a one-line error for each invalid value."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ablate
import bench
import config
import generate
import train
from config import FIELDS, PRESETS, ROPE_SCALING, ModelConfig, Parser, TrainConfig, add_flags, configs_from
from model import Llama
from norms import KINDS
from norms.placement import PLACEMENTS


def parse(flags: str, device: str = "cpu") -> tuple[ModelConfig, TrainConfig]:
    parser = Parser(prog="train.py")
    add_flags(parser)
    return configs_from(parser.parse_args(flags.split()), device)


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
    "--dim 30 --heads 2": "--dim 30 / --heads 2 is odd: RoPE rotates pairs of features",
    "--head-dim 7": "--head-dim is odd: RoPE rotates pairs of features",
    "--rope-scaling factor=8": "--rope-scaling takes all of factor, low_freq_factor, high_freq_factor, original_max",
    "--rope-scaling factor": "--rope-scaling takes key=number, not 'factor'",
    "--rope-scaling factor=many": "--rope-scaling takes key=number, not 'factor=many'",
    **{
        f"--{SCALING.replace('=8', f'={value}')}": "--rope-scaling factor must be a positive number"
        for value in (0, "nan")
    },
    f"--{SCALING.replace('r=1', 'r=4')}": "--rope-scaling low_freq_factor must be below high_freq_factor",
    "--embedding-scale 0": "--embedding-scale must be a positive number, not 0.0",
    "--tokenizer pretrained": "--tokenizer pretrained needs --init-from",
    "--heads 4 --kv-heads 3": "--heads 4 is not divisible by --kv-heads 3",
    "--heads 4 --kv-heads 8": "--heads 4 is not divisible by --kv-heads 8",
    "--batch-size 12 --micro-batch-size 5": "--batch-size 12 is not divisible by --micro-batch-size 5",
    "--batch-size 4 --micro-batch-size 8": "--batch-size 4 is not divisible by --micro-batch-size 8",
    **{f"--lr {value}": f"--lr must be a positive number, not {float(value)}" for value in ("-1", "0", "nan", "inf")},
    **{
        f"--dropout {value}": f"--dropout must be at least 0 and below 1, not {float(value)}"
        for value in ("-0.1", "1", "2.5", "nan")
    },
    **{f"--{name} {value}": f"--{name} must be at least 1, not {value}" for name in SIZES for value in (0, -8)},
    **{
        f"--{name} {value}": f"--{name} must be at most {10_000 if name == 'layers' else 2147483647}, not {value}"
        for name in SIZES
        for value in (2**31, 10**12, 10**20)
    },
    "--dim 2147483646 --heads 1": "weights is too large to train; choose a smaller --dim, --hidden-dim, --layers",
    "--cache-dir=": "--cache-dir must not be empty",
    "--data=": "--data must not be empty; name python, shakespeare, or a path",
    **{f"--{name} -1": f"--{name} must be 0 or more and finite, not -1" for name in ("warmup", "seed")},
    "--weight-decay nan": "--weight-decay must be 0 or more and finite, not nan",
    "--clip inf": "--clip must be 0 or more and finite, not inf",
    "--momentum 1": "--momentum must be at least 0 and below 1, not 1.0",
    "--rope-theta 0": "--rope-theta must be a positive number, not 0.0",
    "--seed 9223372036854775808": "--seed must be below 2**63",
    "--norm-arg eps": "--norm-arg takes key=value, not 'eps'",
    "--norm-arg epsilon=1": "norm 'rmsnorm' has no argument 'epsilon'; it takes eps",
    "--norm none --norm-arg eps=1": "norm 'none' has no argument 'eps'; it takes none",
    "--norm-arg eps=small": "--norm-arg eps takes a number, not 'small'",
    "--norm-arg eps=0": "eps of a norm must be positive and finite, not 0.0",
    "--norm-arg eps=nan": "eps of a norm must be positive and finite, not nan",
    "--norm-arg cast_order=first": "--norm-arg cast_order takes fp32 or llama, not 'first'",
    "--norm layernorm --norm-arg bias=maybe": "--norm-arg bias takes true or false, not 'maybe'",
    "--config nowhere/run.json": "--config nowhere/run.json: not a readable run.json",
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
        ("--placement up", f"argument --placement: invalid choice: up (choose from {', '.join(PLACEMENTS)})"),
        ("--preset huge", f"argument --preset: invalid choice: huge (choose from {', '.join(PRESETS)})"),
        ("--qk-norm both", "argument --qk-norm: invalid choice: both (choose from none, head, full)"),
        ("--optimizer sgd", "argument --optimizer: invalid choice: sgd (choose from muon, adamw)"),
        ("--dim wide", "argument --dim: invalid int value: wide"),
        ("--steps 1.5", "argument --steps: invalid int value: 1.5"),
        ("--lr fast", "argument --lr: invalid float value: fast"),
        ("--lr", "argument --lr: expected one argument"),
        ("--dimension 3", "unrecognized arguments: --dimension 3; did you mean --dim?"),
        ("--lrr=3", "unrecognized arguments: --lrr=3; did you mean --lr?"),
        ("--learning-rate 3", "unrecognized arguments: --learning-rate 3; did you mean --lr?"),
        ("--batch_size 3", "unrecognized arguments: --batch_size 3; did you mean --batch-size?"),
        ("--no-fats", "unrecognized arguments: --no-fats; did you mean --no-fast?"),
        (
            "--n-layers 3 --stesp 4",
            "unrecognized arguments: --n-layers 3 --stesp 4; did you mean --layers and --steps?",
        ),
        ("--zzz 3", "unrecognized arguments: --zzz 3"),
        ("lr", "unrecognized arguments: lr"),
    ],
)
def test_argparse_error_is_one_line_with_exit_code_2(flags, message, capsys):
    with pytest.raises(SystemExit) as excinfo:
        parse(flags)
    line = capsys.readouterr().err
    assert excinfo.value.code == 2
    assert line.replace("'", "") == f"train.py: error: {message}\n"  # quoting differs between Python versions


@pytest.mark.parametrize(
    "command, flags, flag",
    [
        (train.main, "--resmue", "--resume"),
        (generate.main, "--max-tokens 3", "--tokens"),
        (generate.main, "--temprature 0", "--temperature"),
        (ablate.main, "--normss rmsnorm", "--norms"),
        (ablate.main, "claim prenorm-stability --scael quick", "--scale"),
        (bench.main, "norms --row 3 --rowz 3", "--rows"),
    ],
)
def test_every_command_names_the_flag_that_was_meant(command, flags, flag, capsys):
    with pytest.raises(SystemExit) as excinfo:
        command(flags.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert excinfo.value.code == 2
    assert "unrecognized arguments: --" in line and line.endswith(f"did you mean {flag}?")


@pytest.mark.parametrize("name, value", [("norm", "batch"), ("placement", "between"), ("init", "zero")])
def test_config_constructor_error_lists_the_choices(name, value):
    choices = next(field.metadata["choices"] for field in dataclasses.fields(ModelConfig) if field.name == name)
    with pytest.raises(ValueError, match=f"unknown --{name} '{value}'; choose from {', '.join(choices)}"):
        ModelConfig(**{name: value})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": 3, "training": {}}', '{"model": {}}', "\u00e9\udc80"])
def test_unreadable_run_json_is_refused(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"--config .*run\.json: not a readable run\.json"):
        parse(f"--config {path}")


INVALID_FIELDS = [
    ("model", {"dim": "wide"}, "dim must be of type int, not 'wide'"),
    ("model", {"dim": None}, "dim must be of type int, not None"),
    ("model", {"dim": 32.0}, "dim must be of type int, not 32.0"),
    ("model", {"dim": True}, "dim must be of type int, not True"),
    ("model", {"layers": 2.0}, "layers must be of type int, not 2.0"),
    ("model", {"tie_embeddings": "no"}, "tie_embeddings must be of type bool, not 'no'"),
    ("model", {"tie_embeddings": 0}, "tie_embeddings must be of type bool, not 0"),
    ("model", {"norm_args": [1]}, "norm_args must be of type dict[str, typing.Any], not [1]"),
    ("model", {"norm": {}}, "norm must be of type str, not {}"),
    ("model", {"width": 3}, "'width' is not a field of this version"),
    ("training", {"lr": [1]}, "lr must be of type float, not [1]"),
    ("training", {"lr": True}, "lr must be of type float, not True"),
    ("training", {"steps": 3.5}, "steps must be of type int, not 3.5"),
    ("training", {"seed": 1.5}, "seed must be of type int, not 1.5"),
    ("training", {"keep": 1.5}, "keep must be of type int, not 1.5"),
    ("training", {"data": "python"}, "data must be of type list[str], not 'python'"),
    ("training", {"data": ["python", 3]}, "data must be of type list[str], not ['python', 3]"),
    ("training", {"cache_dir": 3}, "cache_dir must be of type str, not 3"),
]


def write_run_json(path: Path, model: dict, training: dict) -> Path:
    path.write_text(json.dumps({"model": model, "training": training}))
    return path


@pytest.mark.parametrize("part, fields, message", INVALID_FIELDS, ids=str)
def test_invalid_field_in_run_json_is_refused(tmp_path, part, fields, message):
    path = write_run_json(tmp_path / "run.json", **({"model": {}, "training": {}} | {part: fields}))
    with pytest.raises(ValueError) as excinfo:
        parse(f"--config {path}")
    assert str(excinfo.value) == f"--config {path}: {message}"


@pytest.mark.parametrize(
    "norm_args, message",
    [
        ({"eps": "small"}, "--norm-arg eps takes a number, not 'small'"),
        ({"eps": True}, "--norm-arg eps takes a number, not True"),
        ({"eps": None}, "--norm-arg eps takes a number, not None"),
        ({"cast_order": 3}, "--norm-arg cast_order takes fp32 or llama, not 3"),
        ({"size": 3}, "norm 'rmsnorm' has no argument 'size'; it takes eps"),
    ],
    ids=str,
)
def test_norm_args_in_run_json_are_checked_like_flags(tmp_path, norm_args, message):
    with pytest.raises(ValueError) as excinfo:
        parse(f"--config {write_run_json(tmp_path / 'run.json', {'norm_args': norm_args}, {})}")
    assert message in str(excinfo.value) and "\n" not in str(excinfo.value)


def test_run_json_accepts_null_and_int_for_float(tmp_path):
    model = {"kv_heads": None, "hidden_dim": None, "norm_args": {"eps": 1}}
    training = {"warmup": None, "compile": None, "micro_batch_size": None, "lr": 1}
    path = write_run_json(tmp_path / "run.json", model, training)
    assert parse(f"--config {path}") == (ModelConfig(norm_args={"eps": 1.0}), TrainConfig(lr=1.0))


def test_missing_fields_in_run_json_get_the_defaults(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": {"dim": 64, "rope_theta": 500}, "training": {}}))
    assert parse(f"--config {path}") == (ModelConfig(dim=64, rope_theta=500.0), TrainConfig())


def test_flags_recompute_derived_defaults(tmp_path):
    model, training = ModelConfig(dim=64, heads=4, vocab_size=257), TrainConfig(tokenizer="bytes", batch_size=8)
    path = write_run_json(tmp_path / "run.json", dataclasses.asdict(model), dataclasses.asdict(training))
    assert parse(f"--config {path} --dim 128")[0] == dataclasses.replace(
        model, dim=128, head_dim=128 // model.heads, hidden_dim=352
    )
    assert parse(f"--config {path} --heads 8")[0].kv_heads == 8
    assert parse(f"--config {path} --heads 8")[0].head_dim == 8
    assert parse(f"--config {path} --tokenizer sentencepiece")[0].vocab_size == ModelConfig().vocab_size
    assert parse(f"--config {path} --tokenizer sentencepiece --vocab-size 300")[0].vocab_size == 300
    assert parse(f"--config {path} --batch-size 8")[1] == training
    assert parse(f"--config {path} --batch-size 24")[1].micro_batch_size == 8
    assert parse(f"--config {path} --batch-size 4")[1].micro_batch_size == 4
    assert parse("--preset 124m --tokenizer bytes")[0].vocab_size == 257


# A run whose options differ from their defaults, so that a reset shows. The warmup is the default for 100 steps.
MODEL: dict[str, Any] = dict(
    norm="layernorm", norm_args={"bias": False}, qk_norm="full", dim=64, layers=2, heads=4, kv_heads=2, head_dim=12,
    hidden_dim=40, context=99, vocab_size=300, rope_theta=500.0, embedding_scale=3.0, tie_embeddings=False,
    scaled_embedding=True, dropout=0.3, init="normal", depth_scaled_init=False,
)  # fmt: skip
TRAINING: dict[str, Any] = dict(
    data=["shakespeare"], steps=100, warmup=5, batch_size=12, micro_batch_size=2, lr=0.3, schedule="cosine",
    weight_decay=0.3, momentum=0.3, clip=3.0, skip_nonfinite=3, seed=3, device="cpu", dtype="float32", tf32=True,
    deterministic=True, recompute=True, compile=False, fast=False, shard=True, eval_every=3, eval_tokens=3,
    save_every=3, keep=3, log="wandb", out="out", cache_dir="elsewhere",
)  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "--dim 256": {"dim": 256, "hidden_dim": 704, "head_dim": 64},
    "--heads 8": {"heads": 8, "kv_heads": 8, "head_dim": 8},
    "--norm rmsnorm": {"norm": "rmsnorm", "norm_args": {}},
    "--placement deepnorm": {"placement": "deepnorm", "init": "xavier"},
    "--tokenizer bytes": {"tokenizer": "bytes", "vocab_size": 257},
    "--steps 200": {"steps": 200, "warmup": 10},
    "--batch-size 9": {"batch_size": 9, "micro_batch_size": 9},
    "--batch-size 8": {"batch_size": 8},
    "--layers 3 --kv-heads 1 --context 64": {"layers": 3, "kv_heads": 1, "context": 64},
    "--head-dim 8": {"head_dim": 8},
    "--hidden-dim 64": {"hidden_dim": 64},
    "--vocab-size 500": {"vocab_size": 500},
    "--init xavier --qk-norm head": {"init": "xavier", "qk_norm": "head"},
    "--micro-batch-size 1": {"micro_batch_size": 1},
    "--warmup 9": {"warmup": 9},
    "--optimizer adamw --lr 0.1 --dtype float16": {"optimizer": "adamw", "lr": 0.1, "dtype": "float16"},
}


@pytest.mark.parametrize("flags, changed", CHANGES.items())
def test_an_option_changes_what_follows_from_it_and_nothing_else(tmp_path, flags, changed):
    model, training = (dataclasses.asdict(each) for each in (ModelConfig(**MODEL), TrainConfig(**TRAINING)))
    path, before, after = write_run_json(tmp_path / "run.json", model, training), model | training, dict[str, Any]()
    at_default = {name for name, field in FIELDS.items() if before[name] in (field.default, {})}
    assert at_default == {"placement", "rope_scaling", "tokenizer", "init_from", "optimizer"}
    for each in parse(f"--config {path} {flags}"):
        after |= dataclasses.asdict(each)
    assert {name: value for name, value in after.items() if value != before[name]} == changed


def test_more_steps_keep_a_warmup_that_was_chosen(tmp_path):
    for warmup, later in ((7, 7), (5, 10)):  # 5 is the default for 100 steps
        training = TrainConfig(steps=100, warmup=warmup)
        path = write_run_json(tmp_path / "run.json", {}, dataclasses.asdict(training))
        assert parse(f"--config {path} --steps 200")[1].warmup == later
        assert parse(f"--config {path} --steps 200 --warmup 3")[1].warmup == 3


def test_flag_that_repeats_the_preset_changes_nothing():
    """Both for values that the preset sets and for values that it leaves at the default."""
    for preset in ("124m", "1b"):
        model, training = parse(f"--preset {preset}")
        flags = f"--dim {model.dim} --heads {model.heads} --tokenizer sentencepiece --batch-size {training.batch_size}"
        assert parse(f"--preset {preset} {flags}") == (model, training)


@pytest.mark.parametrize("batch, micro", [(480, 16), (512, 16), (60, 60), (7, 7), (8, 8)])
def test_micro_batch_size_is_kept_if_it_divides_the_new_batch_size(tmp_path, batch, micro):
    path = write_run_json(tmp_path / "run.json", {}, {"batch_size": 480, "micro_batch_size": 16})
    assert parse(f"--config {path} --batch-size {batch}")[1].micro_batch_size == micro


# --- fields, flags, presets ------------------------------------------------------------------------------------------


def test_every_field_has_a_flag_with_help_and_default(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for config_class in (ModelConfig, TrainConfig):
        for field in dataclasses.fields(config_class):
            assert f" {flag(field)}" in text
            help_text = field.metadata["help"].replace("%%", "%")
            default = {"data": "python", "norm_args": None, "rope_scaling": None}.get(field.name, field.default)
            if default not in (None, ""):
                help_text += f" (default: {default})"
            elif field.name not in ("norm_args", "rope_scaling"):
                assert "default: " in help_text  # a default derived from other fields
            assert help_text.replace(" ", "") in text.replace(" ", "")  # argparse breaks lines after hyphens too
    assert len(FIELDS) == len(dataclasses.fields(ModelConfig)) + len(dataclasses.fields(TrainConfig))


def test_every_flag_sets_its_field():
    """Each flag sets the field of the same name."""
    values = {
        "norm": "layernorm", "placement": "post", "qk_norm": "full", "dim": 48, "layers": 3, "heads": 6, "kv_heads": 3,
        "hidden_dim": 17, "context": 12, "vocab_size": 400, "rope_theta": 123.5, "tie_embeddings": False,
        "head_dim": 10, "scaled_embedding": True, "embedding_scale": 3.5, "init_from": "base",
        "dropout": 0.25, "init": "xavier", "depth_scaled_init": False,
        "data": ["shakespeare", "a/b.txt"], "tokenizer": "sentencepiece", "steps": 40, "batch_size": 12,
        "micro_batch_size": 2, "lr": 0.5, "schedule": "wsd", "warmup": 7, "weight_decay": 0.75, "optimizer": "adamw",
        "momentum": 0.5, "clip": 2.5, "skip_nonfinite": 3, "seed": 11, "device": "cpu", "dtype": "float16",
        "recompute": True, "tf32": True, "deterministic": True,
        "compile": True, "fast": True, "shard": True, "eval_every": 5, "eval_tokens": 999,
        "save_every": 6, "keep": 4, "log": "wandb", "out": "somewhere",
        "cache_dir": "elsewhere",
    }  # fmt: skip
    scaling = dict(zip(ROPE_SCALING, (8.0, 1.0, 4.0, 6.0), strict=True))
    flags = "--norm-arg bias=false --norm-arg eps=0.5" + "".join(f" --rope-scaling {k}={v}" for k, v in scaling.items())
    for name, value in values.items():
        flag_name = name.replace("_", "-")
        if isinstance(value, bool):
            flags += f" --{flag_name}" if value else f" --no-{flag_name}"
        else:
            flags += f" --{flag_name} {' '.join(value) if isinstance(value, list) else value}"
    model, training = parse(flags)
    got = dataclasses.asdict(model) | dataclasses.asdict(training)
    assert got == values | {"norm_args": {"bias": False, "eps": 0.5}, "rope_scaling": scaling}


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
    assert parse("--tokenizer bytes --vocab-size 5000")[0].vocab_size == 257


def test_mutable_defaults_are_not_shared():
    assert TrainConfig().data is not TrainConfig().data
    assert ModelConfig().norm_args is not ModelConfig().norm_args


def test_precedence_of_flags_run_json_preset_and_defaults(tmp_path):
    path = tmp_path / "run.json"
    saved_model, saved_training = ModelConfig(dim=64, norm_args={"eps": 0.5}), TrainConfig(steps=77, lr=0.25)
    path.write_text(
        json.dumps({"model": dataclasses.asdict(saved_model), "training": dataclasses.asdict(saved_training)})
    )
    assert parse(f"--config {path}") == (saved_model, saved_training)
    with pytest.raises(ValueError, match="use either --preset or --config, not both"):
        parse(f"--config {path} --preset 1b")
    model, training = parse(f"--config {path} --lr 0.125 --norm-arg eps=0.75")
    assert model == dataclasses.replace(saved_model, norm_args={"eps": 0.75})
    assert training == dataclasses.replace(saved_training, lr=0.125)
    assert parse("--preset small --steps 9")[1].steps == 9
    assert parse("--preset small --steps 9")[0].dim == PRESETS["small"]["dim"]


def test_default_preset_depends_on_the_device():
    assert parse("")[0].dim == ModelConfig().dim
    assert parse("", "cuda")[0].dim == parse("", "mps")[0].dim == PRESETS["small"]["dim"]
    assert parse("--preset tiny", "cuda")[0].dim == ModelConfig().dim


def test_norm_args_are_converted_to_their_types():
    assert parse("--norm-arg eps=1e-3 --norm-arg cast_order=llama")[0].norm_args == {"eps": 1e-3, "cast_order": "llama"}
    assert parse("--norm layernorm --norm-arg bias=true")[0].norm_args == {"bias": True}
    assert math.isclose(parse("--norm batchnorm --norm-arg momentum=0.25")[0].norm_args["momentum"], 0.25)


def test_config_weights_is_the_number_of_parameters():
    for model_config in (ModelConfig(norm="none"), ModelConfig(norm="none", heads=8, kv_heads=2, tie_embeddings=False)):
        with torch.device("meta"):
            assert model_config.weights == sum(weight.numel() for weight in Llama(model_config).parameters())


def test_help_shows_dir_metavar(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "--out DIR" in text and "--cache-dir DIR" in text


def test_new_option_adds_a_flag(capsys):
    @dataclasses.dataclass
    class Extra:
        speed: float = config.option(1.5, "how fast")

    parser = Parser(prog="x")
    config.add_options(parser, Extra)
    assert vars(parser.parse_args([])) == {}
    assert parser.parse_args(["--speed", "2"]).speed == 2.0
