"""Two commands that want one folder: one gets it, the other ends with exit code 4."""

import os
import signal
from pathlib import Path

import pytest

import train


@pytest.fixture
def train_suspended(before_file_event):
    """`train_suspended(arguments)` trains, and waits for SIGCONT before it writes trainer.json."""

    def run(arguments: list[str]) -> None:
        def suspend(event: str, path: Path) -> None:
            if path.name == "trainer.json" and event == "open":
                os.kill(os.getpid(), signal.SIGSTOP)

        before_file_event(suspend)
        train.main(arguments)

    return run


def suspended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_two_runs_in_one_folder(command, train_suspended, undisturbed, fork, same, until, tmp_path):
    """Started together or resumed: one trains as if alone. After SIGKILL the folder is free."""
    run = tmp_path / "run"
    pair = [fork(train_suspended, command) for _ in range(2)]
    until(lambda: any(child.ended() for child in pair) and any(not c.ended() and suspended(c.pid) for c in pair))
    loser, winner = sorted(pair, key=lambda child: not child.ended())
    assert loser.exitcode == 4 and loser.text.endswith(f"error: {run} is in use by another process\n"), loser.text
    resumed = fork(train.main, ["--resume", "--out", str(run)])
    assert resumed.wait() == 4 and resumed.text == f"error: {run} is in use by another process\n", resumed.text
    winner.send(signal.SIGKILL)
    winner.wait()
    train.main(["--resume", "--out", str(run)])
    assert same(run, undisturbed)
