"""Runs of an ablation train in this process."""

from types import SimpleNamespace

import pytest

import train
from experiments.grid import Cell, Grid


@pytest.fixture
def in_process(monkeypatch) -> list[tuple[Cell, str]]:
    """Cells train in this process, one after the other. The list has the cells and their devices."""
    started: list[tuple[Cell, str]] = []

    def start(grid: Grid, cell: Cell, device: str) -> SimpleNamespace:
        started.append((cell, device))
        code: int | str | None = 0
        try:
            train.main(grid.command(cell, device)[2:])
        except SystemExit as exit:
            code = exit.code
        return SimpleNamespace(returncode=code, poll=lambda: code, terminate=lambda: None, wait=lambda: code)

    monkeypatch.setattr(Grid, "start", start)
    monkeypatch.setattr("experiments.grid.POLL_SECONDS", 0.0)
    return started
