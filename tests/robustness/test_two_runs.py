"""Two commands that want one folder: one gets it, the other ends with exit code 4; a corpus is prepared once."""

import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import ablate
import train

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and finds processes in /proc"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # it has threads, of which none is needed
]
STEPS = "--steps 6 --save-every 3 --eval-every 6 --eval-tokens 64"


@pytest.fixture
def command(flags: list[str]) -> list[str]:
    return [*flags, *STEPS.split()]


@pytest.fixture(scope="module")
def undisturbed(flags_in, tmp_path_factory) -> Path:
    """The same run, alone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train.main([*flags_in(folder), *STEPS.split()])
    return folder / "run"


@pytest.fixture
def train_suspended_at(command, before_file_event, tmp_path) -> Callable[..., None]:
    """`train_suspended_at(pattern, k)` trains, and waits for SIGCONT before the k-th call that writes once a file of
    this name exists."""

    def run(pattern: str, event: int = 0, *flags: str) -> None:
        events = itertools.count()

        def suspend(number: int) -> None:
            if any(tmp_path.glob(pattern)) and next(events) == event:
                os.kill(os.getpid(), signal.SIGSTOP)

        before_file_event(suspend)
        train.main([*command, *flags])

    return run


def test_two_runs_in_one_folder(cases, record, train_suspended_at, undisturbed, fork, fingerprint, tmp_path):
    """Started together or up to half a second apart, with imports done: one trains as if alone, the other ends at once.

    The winner waits in a save until the other has ended, so that no machine is too fast for this. The other makes fewer
    than 20 calls that write.
    """
    draw, run, slowest, pairs = random.Random(0), tmp_path / "run", 0.0, cases(1, 20)
    for pair in range(pairs):
        first = fork(train_suspended_at, "run/metrics.jsonl", 20)
        time.sleep(draw.choice([0, draw.uniform(0, 0.5)]))
        second = fork(train_suspended_at, "run/metrics.jsonl", 20)
        wait_until(lambda first=first, second=second: first.ended() or second.ended())
        loser, winner = (first, second) if first.ended() else (second, first)
        slowest = max(slowest, time.monotonic() - loser.started)
        assert loser.code == 4, (pair, loser.text, winner.text)
        assert loser.text.endswith(f"error: {run} is in use by another process\n"), loser.text
        wait_until(partial(suspended, winner.pid))
        winner.send(signal.SIGCONT)
        assert winner.wait() == 0, winner.text
        assert fingerprint(run) == fingerprint(undisturbed)
        shutil.rmtree(run)
        shutil.rmtree(tmp_path / "cache")
    assert slowest < 5
    record(pairs=pairs, one_winner=pairs, slowest_refusal_seconds=round(slowest, 2))


def test_resuming_a_run_in_use(command, undisturbed, fork, tmp_path):
    """Is refused before the text is prepared. After SIGKILL the folder is free."""
    run = tmp_path / "run"
    first = fork(train.main, [*command, "--steps", "100000"])
    wait_until(lambda: (run / "metrics.jsonl").exists())
    shutil.rmtree(tmp_path / "cache")
    for arguments in (command, ["--resume", "--out", str(run)]):
        second = fork(train.main, arguments)
        assert second.wait() == 4 and second.text == f"error: {run} is in use by another process\n", second.text
    assert not (tmp_path / "cache").exists()
    first.send(signal.SIGKILL)
    first.wait()
    resume = ["--resume", "--out", str(run), "--steps", "6", "--cache-dir", str(tmp_path / "cache")]
    third = fork(train.main, resume)
    assert third.wait() == 0, third.text


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


def test_one_corpus_prepared_twice_at_once(
    cases, record, command, train_suspended_at, undisturbed, fork, fingerprint, tmp_path
):
    """The second process waits for the first, which is suspended while it prepares, and then goes on or is killed."""
    draw, cache, pairs, killed = random.Random(0), tmp_path / "cache", cases(2, 20), 0
    for pair in range(pairs):
        first = fork(train_suspended_at, "cache/*.part", draw.randrange(5), "--out", str(tmp_path / "a"))
        wait_until(partial(suspended, first.pid))
        second = fork(train.main, [*command, "--out", str(tmp_path / "b")])
        wait_until(lambda second=second: "waiting for another process" in second.text)
        assert len(list(cache.glob("*.part"))) == 1 and not second.ended()
        finished = [second] if pair % 2 else [second, first]
        first.send(signal.SIGKILL if pair % 2 else signal.SIGCONT)
        assert [child.wait() for child in finished] == [0] * len(finished), [child.text for child in finished]
        killed += first.wait() == -signal.SIGKILL
        for name in ("b",) if pair % 2 else ("a", "b"):
            assert fingerprint(tmp_path / name) == fingerprint(undisturbed)
        assert not list(cache.glob("*.part"))
        for folder in (cache, tmp_path / "a", tmp_path / "b"):
            shutil.rmtree(folder, ignore_errors=True)
    record(pairs=pairs, waited=pairs, killed=killed, right=pairs)


def suspended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_two_ablations_in_one_folder(cases, record, flags, fork, tmp_path):
    """One runs. The other ends with exit code 4, and the first is not disturbed."""
    out, slowest, pairs = tmp_path / "run", 0.0, cases(1, 5)
    for pair in range(pairs):
        command = [*flags, "--steps", "4", "--eval-tokens", "64", "--seeds", "1"]
        first, second = fork(ablate.main, command), fork(ablate.main, command)
        wait_until(lambda first=first, second=second: first.ended() or second.ended())
        loser, winner = (first, second) if first.ended() else (second, first)
        slowest = max(slowest, time.monotonic() - loser.started)
        assert loser.code == 4, (pair, loser.text, winner.text)
        assert loser.text.endswith(f"error: {out} is in use by another process\n"), loser.text
        if pair:
            assert winner.wait(300) == 0, winner.text
            assert "| rmsnorm |" in (out / "table.md").read_text()
        else:
            winner.send(signal.SIGTERM)
            assert winner.wait() == 143, winner.text
        shutil.rmtree(out)
    assert slowest < 5
    record(pairs=pairs, one_winner=pairs, slowest_refusal_seconds=round(slowest, 2))
