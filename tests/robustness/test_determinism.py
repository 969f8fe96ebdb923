"""A warning where a resumed run cannot have the same bits."""

import pytest
import torch

import train

pytestmark = pytest.mark.usefixtures("undrawn")


def test_a_resume_elsewhere_is_warned_about(flags, monkeypatch, capsys):
    """In one line, which says what it ran on before and now. The threads are part of the device."""
    train.main([*flags, "--steps", "1"])
    train.main([*flags, "--resume", "--steps", "2"])
    assert "same bits" not in capsys.readouterr().err
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    train.main([*flags, "--resume", "--steps", "3"])
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "same bits" in line]
    before, now = warning.split(", now ")
    assert f"{threads} threads), " in before and f"{threads + 1} threads), " in now
