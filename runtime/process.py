"""How a command starts, is stopped, prints and ends.

Only the standard library is imported at the top, because a command calls `start` before it imports anything else:
importing torch takes seconds, and a signal that arrives then must not end in a traceback. Not covered are the
milliseconds before the command's first line. Signals that are ignored stay ignored: SIGHUP under nohup, SIGINT in a
shell's background job.
"""

import errno
import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from files import DISK_FAILED, InUse, one_line

FAILED, BAD_INPUT, OUT_OF_MEMORY, IN_USE, NOT_FINITE = 1, 2, 3, 4, 5
SHOWN_ROWS = 8  # of a batch; metrics.jsonl has all of them
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
SAME_STOP = 1.0  # seconds
temporary_folders: list[str] = []  # removed when a signal ends this process


# --- starting --------------------------------------------------------------------------------------------------------


def start() -> None:
    """End at signals with one line, and draw plots into files only."""
    stop_at_signals()
    os.environ.pop("MPLBACKEND", None)  # a notebook sets it to its own, which may be missing here


# --- signals ---------------------------------------------------------------------------------------------------------


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


# --- standard output and error ----------------------------------------------------------------------------------------


class _Lossy(io.FileIO):
    """A file descriptor that drops what cannot be written, as to a pipe that `head` has closed (on Windows, EINVAL).

    If the reason is another one, such as a full disk, a line on standard error says so.
    """

    warned = False

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EINVAL) and self.fileno() == 1 and not self.warned:
                self.warned = True
                print(f"warning: standard output is lost: {error.strerror}", file=sys.stderr)
            return memoryview(data).nbytes


def replace_closed() -> None:
    """Give standard streams that are closed to the null device, so that no file gets their descriptors."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (stays open)


def outlive_readers(names: Sequence[str] = ("stdout", "stderr")) -> None:
    """Go on when nobody reads these streams any more. What the locale cannot encode is printed as an escape.

    A stream that is not the process's own, as in a notebook or a test, stays as it is.
    """
    replace_closed()
    for name in names:
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            stream.flush()
            lossy: Any = _Lossy(stream.fileno(), "w", closefd=False)
            if not stream.write_through:  # as with python -u
                lossy = io.BufferedWriter(lossy)
            buffering = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(lossy, stream.encoding, "backslashreplace", **buffering))


def write(text: str) -> None:
    """Write to standard output, for a command whose result that is.

    Raises BrokenPipeError if its reader has left, and OSError with the reason if it cannot be written.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python exits
        if isinstance(error, BrokenPipeError):
            raise
        raise OSError(f"standard output cannot be written: {error.strerror}") from None


# --- exit codes ------------------------------------------------------------------------------------------------------


class NotFinite(ValueError):
    """A loss, a gradient, a weight or a logit is NaN or infinite.

    In training, `step` says when. If that is due to its batch, `row_starts` says where the rows of the batch begin in
    the tokens of the training text.
    """

    def __init__(self, what: str, step: int = 0, row_starts: Sequence[int] = ()):
        rows = ", ".join(map(str, row_starts[:SHOWN_ROWS])) + (", ..." if len(row_starts) > SHOWN_ROWS else "")
        message = f"{what} not finite" + (f" at step {step}; try a lower --lr" if step else "")
        if row_starts:
            message += f", or a higher --skip-nonfinite; rows of its batch begin at training tokens {rows}"
        super().__init__(message)
        self.step, self.row_starts = step, row_starts


class Stopped(Exception):
    """A signal asked the run to stop, and it has saved."""

    def __init__(self, signum: int, resume_with: str = "--resume"):
        super().__init__(f"stopped by {signal.Signals(signum).name}; continue with {resume_with}")
        self.signum = signum


class CellFailed(Exception):
    """A run that this command started has failed with exit code `code`. `line` is its error or its last line."""

    def __init__(self, cell: str, code: int, line: str):
        if code < 0:
            reason = f"killed by {signal.Signals(-code).name}"
        elif "error: " in line:
            reason = line.removeprefix("error: ")
        else:
            reason = f"exit code {code}" + (f"; its last line is {line}" if line else "")
        super().__init__(f"{cell}: {reason}")
        self.code = max(1, code)


@contextmanager
def bad_input() -> Iterator[None]:
    """Wrap input handling: a ValueError or OSError there ends with exit code 2. All ranks must have the same error.

    That the disk failed, or that a process we started was killed, is not bad input; it ends with exit code 1. That
    memory ran out is left to `exit_codes`.
    """
    try:
        yield
    except ChildProcessError as error:
        _exit(FAILED, str(error))
    except (ValueError, OSError) as error:
        if out_of_memory(error):
            raise
        failed = isinstance(error, OSError) and error.errno in DISK_FAILED
        _exit_together(FAILED if failed else BAD_INPUT, str(error))


@contextmanager
def exit_codes(memory_options: str) -> Iterator[None]:
    """Wrap the work itself. `memory_options` names the flags to change when memory runs out."""
    try:
        yield
    except InUse as error:
        _exit_together(IN_USE, str(error))
    except NotFinite as error:
        _exit_together(NOT_FINITE, str(error))
    except Stopped as error:
        _exit_together(128 + error.signum, str(error))
    except CellFailed as error:
        _exit(error.code, str(error))
    except KeyboardInterrupt:
        _exit(128 + signal.SIGINT, "interrupted")
    except Exception as error:
        if out_of_memory(error):
            _exit(OUT_OF_MEMORY, f"out of memory; try a smaller {memory_options}")
        if isinstance(error, OSError):  # usually a full disk; every finished checkpoint is intact
            _exit(FAILED, str(error))
        from runtime.plugins import error_line

        if line := error_line(error):  # a norm or a placement that the user wrote
            _exit(BAD_INPUT, line)
        raise


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. On every device torch says that it cannot allocate it."""
    allocation = isinstance(error, RuntimeError) and "allocate" in str(error)
    mapping = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return allocation or mapping or isinstance(error, MemoryError)


def _exit_together(code: int, line: str) -> None:
    """Exit for a reason that every rank has. Rank 0 says it, before torchrun sees any of them end."""
    from runtime import distributed

    with distributed.printed_by_main():
        _exit(code, line)


def _exit(code: int, line: str) -> None:
    print(f"error: {one_line(line)}", file=sys.stderr)
    say_nothing_more()
    sys.exit(code)
