"""A warning where a resumed run cannot have the same bits."""

import pytest
import torch

import train

pytestmark = pytest.mark.usefixtures("undrawn")


def test_a_resume_elsewhere_is_warned_about(flags, monkeypatch, capsys):
    """In one line, which names what has changed. The threads are part of the device."""
    train.main([*flags, "--steps", "1"])
    train.main([*flags, "--resume", "--steps", "2"])
    assert "same bits" not in capsys.readouterr().err
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    train.main([*flags, "--resume", "--steps", "3"])
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "same bits" in line]
    assert f"{threads} threads), now " in warning and f"{threads + 1} threads)" in warning
    assert "torch" not in warning and "instruction_set" not in warning
