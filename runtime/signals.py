"""SIGINT, SIGTERM and SIGHUP: a training run saves first, everything else stops at once, with one line.

Only the standard library is imported here, because a command installs its handlers before it imports anything else:
importing torch takes seconds, and a signal that arrives then must not end in a traceback. Not covered are the
milliseconds before the command's first line. Signals that are ignored stay ignored: SIGHUP under nohup, SIGINT in a
shell's background job.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
SAME_STOP = 1.0  # seconds
temporary_folders: list[str] = []  # removed when a signal ends this process


def stop_at_signals() -> None:
    """From now on a signal ends this process. For a command, on its first line; never for an import as a library."""
    for number in _not_ignored():
        signal.signal(number, stop_now)


def stop_now(number: int, frame: FrameType | None = None) -> None:
    """Say so in one line, end the processes that this one has started, and exit with code 128 + `number`.

    No exception is raised, because imports and callbacks from C swallow them. Whatever is being written is left as
    `kill -9` would leave it. Of several ranks, rank 0 says it.
    """
    say_nothing_more()
    if os.environ.get("RANK", "0") == "0":
        line = f"error: stopped by {signal.Signals(number).name}\n"
        with suppress(OSError):  # standard error may be closed
            os.write(2, (b"\n" if os.isatty(2) else b"") + line.encode())  # below a progress bar
    stop_silently(number)


def stop_silently(number: int, frame: FrameType | None = None) -> None:
    """`stop_now` without the line."""
    for child in _descendants(os.getpid()):
        with suppress(OSError):  # it has just ended
            os.kill(child, signal.SIGTERM)
    for folder in temporary_folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def say_nothing_more() -> None:
    """The command has said why it ends: a signal from now on, such as torchrun's, adds no other line."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is stop_now:
            signal.signal(number, stop_silently)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect signals in a list. The loop inside finishes its step, saves and stops.

    A signal that comes later than `SAME_STOP` stops immediately; one that comes sooner is of the same stop, as when a
    shell and the system both pass on that a terminal was closed. With several ranks none does: each may get those of
    the terminal and of torchrun, which kills them after 30 s.
    """
    requests: list[int] = []
    first = 0.0

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal first
        first = first or time.monotonic()
        if time.monotonic() - first > SAME_STOP and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            stop_now(number)
        requests.append(number)

    earlier = {number: signal.signal(number, request) for number in _not_ignored()}
    try:
        yield requests
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _not_ignored() -> list[int]:
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def _descendants(pid: int) -> list[int]:
    """Children, their children, and so on. Only on Linux; elsewhere a compiler ends by itself, and so does a process
    that encodes text.
    """
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread or the process has just ended
            children += map(int, path.read_text().split())
    return [found for child in children for found in (child, *_descendants(child))]
