"""What follows from what was asked, of a new run, of a resumed one, and of one from the run.json of another."""

import signal
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import train
from data.prepare import prepare
from machine.process import Stopped
from runtime import run
from runtime.run_dir import newest_run, read_run_file


def test_a_device_that_this_machine_lacks_gives_way_unless_it_was_asked_for():
    first, there = run.resolve({"dtype": "float32"}), "cuda:99"
    fields = run.fields_of(first.model, first.training)
    previous = {"asked": first.asked, "resolved": fields | {"device": there}, "imports": []}
    assert run.resolve({}, previous) == first
    previous["asked"] = first.asked | {"device": there}
    assert run.resolve({"device": "cpu"}, previous).training.device == "cpu"
    for asked in ({}, {"device": there}):
        with pytest.raises(ValueError, match=f"--device {there}: "):
            run.resolve(asked, previous)


def test_run_json_stores_what_was_asked_and_the_preset(text, tmp_path, monkeypatch):
    """Also a preset that was chosen by default, and nothing that follows from something else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = prepare([str(text)], "bytes", 257, tmp_path, 32)  # the default corpus would take longer
    monkeypatch.setattr(run, "prepare", lambda *args: small)
    monkeypatch.setattr(train.Trainer, "loop", Mock(side_effect=Stopped(signal.SIGTERM, "")))
    asked: dict[str, Any] = {"preset": "tiny"}
    for flags, more in (
        ("", {}),
        ("--resume --lr 0.01", {"lr": 0.01}),
        ("--config runs/text-rmsnorm-pre/run.json --clip 2", {"clip": 2.0}),
    ):
        with pytest.raises(SystemExit):
            train.main(flags.split())
        asked |= more
        assert read_run_file(newest_run() / "run.json")["asked"] == asked
