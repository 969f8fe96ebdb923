"""Flags: one for each option, and text to values and back. robustness/ has those refused."""

import dataclasses
from types import UnionType
from typing import Any, get_origin

import pytest

import config
from config import DEFAULTS, FIELDS, ModelConfig, TrainConfig, flag_name, option
from runtime import flags
from runtime.flags import read_keywords, read_train, to_flags
from runtime.run import fields_of, resolve
from runtime.run_dir import read_run_file, write_run_file


def help_text(capsys) -> str:
    with pytest.raises(SystemExit):
        read_train(["--help"])
    return " ".join(capsys.readouterr().out.split())


def another(field: dataclasses.Field) -> Any:
    """A value of this option that is not its default."""
    values: dict[Any, Any] = {bool: field.default is not True, int: 7, float: 0.25, str: "a b", list: ["a b", "c"]}
    values[UnionType] = "sqrt"
    values[dict] = {"eps": 1e-05, "bias": False, "cast_order": "llama", "groups": 3}
    choices = [choice for choice in field.metadata.get("choices", ()) if choice != field.default]
    return choices[-1] if choices else values[get_origin(field.type) or field.type]


def test_every_flag_sets_its_field(capsys, monkeypatch):
    """And is in the help. Text becomes a value of the option's type, ~ the home. What was not asked is not there."""
    asked, text = {name: another(field) for name, field in FIELDS.items() if field.metadata["help"]}, help_text(capsys)
    assert FIELDS.keys() - asked.keys() == {"trained_context", "model_type"}
    assert all(f" {flag_name(name)}" in text for name in asked)
    asked |= {"preset": "1b", "config": "run.json", "resume": True, "eval_only": True}
    found = read_train(to_flags(asked))
    assert found == asked and all(type(found[name]) is type(value) for name, value in asked.items())
    booleans = [name for name, field in FIELDS.items() if field.type is bool]
    for value in (True, False):
        assert read_train(to_flags(dict.fromkeys(booleans, value))) == dict.fromkeys(booleans, value)
    assert read_train([]) == {} == read_train(to_flags({"resume": False, "val_data": [], "kv_heads": None}))
    paths: dict[str, Any] = dict.fromkeys(["tokenizer", "init_from", "out", "cache_dir"], "~/x")
    paths |= {"data": ["~/x", "y"], "val_data": ["~/z"]}
    monkeypatch.setenv("HOME", "/me")
    assert read_train(to_flags(paths)) == read_keywords(paths, {}) == eval(str(paths).replace("~", "/me"))
    again = ["--data", "a", "--norm-arg", "eps=1", "--data", "b", "c", "--norm-arg", "bias=True"]
    assert read_train(again) == {"data": ["a", "b", "c"], "norm_args": {"eps": 1, "bias": True}}


def test_an_option_is_one_field(monkeypatch, capsys, tmp_path):
    """Of a configuration: its flag, its help, and run.json, where an older one lacks it."""
    run: dict[str, Any] = {"asked": {"steps": 9}, "resolved": {**DEFAULTS}, "imports": []}
    copied: Any
    new: list[tuple[Any, str, type, Any]] = [(ModelConfig, "gated", bool, option(False, "gate attention"))]
    new += [(TrainConfig, "router_loss", float, option(0.25, "a term"))]
    for original, name, kind, default in new:
        field = [(name, kind, default)]
        copied = dataclasses.make_dataclass(original.__name__, field, bases=(original,), frozen=True)
        for module in (config, flags):
            monkeypatch.setattr(module, original.__name__, copied)
        monkeypatch.setitem(FIELDS, name, copied.__dataclass_fields__[name])
        monkeypatch.setitem(DEFAULTS, name, default.default)
    text = help_text(capsys)
    assert "--gated, --no-gated gate attention" in text and "--router-loss FLOAT a term (default: 0.25)" in text
    here = ["--device", "cpu", "--dtype", "float32", "--no-compile"]
    for line, expected in (("", (False, 0.25)), ("--gated --router-loss 1", (True, 1.0)), ("--lr 1", (True, 1.0))):
        asked, model, training, *_ = resolve(read_train([*here, *line.split()]), run)
        run |= {"asked": asked, "resolved": fields_of(model, training)}
        write_run_file(tmp_path / "run.json", run)
        run = read_run_file(tmp_path / "run.json")
        assert (run["resolved"]["gated"], run["resolved"]["router_loss"]) == expected
    assert (run["asked"]["gated"], run["asked"]["router_loss"], run["asked"]["steps"]) == (True, 1.0, 9)
