"""How a command starts, is stopped by signals, prints, and ends.

Only the standard library is imported at the top, because a command calls `start` before it imports anything else:
importing torch takes seconds, and a signal that arrives in them must not end in a traceback.
"""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from types import FrameType
from typing import Any

from files import DISK_FAILED, BadInput, InUse, one_line

FAILED, OUT_OF_MEMORY = 1, 3  # other exit codes are those of exceptions
PACKAGES = ("torch", "numpy", "sentencepiece", "safetensors", "tqdm", "matplotlib")
SETUP = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && .venv/bin/python train.py"  # in README
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
SAME_STOP = 1.0  # seconds


# --- starting --------------------------------------------------------------------------------------------------------


def start(may_close: Sequence[str] = ("stdout", "stderr")) -> None:
    """Prepare the process of a command. It continues when the streams `may_close` are closed meanwhile.

    Characters that the locale cannot encode are escaped there.
    """
    stop_at_signals()
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        _exit(BadInput.code, f"{sys.executable} has no {', '.join(missing)}; use the virtual environment: {SETUP}")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # libgomp's own number slows down a busy machine several times
    os.environ.pop("MPLBACKEND", None)  # plots go to files; a notebook's own backend may be missing
    for name in may_close:
        stream = getattr(sys, name)
        if stream and stream is getattr(sys, f"__{name}__"):  # not a notebook's
            lossy = io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(lossy, stream.encoding, "backslashreplace", line_buffering=True))


# --- signals ---------------------------------------------------------------------------------------------------------


def stop_at_signals() -> None:
    """From now on a signal ends this process. Ignored signals stay ignored, such as SIGHUP under nohup."""
    for number in _not_ignored():
        signal.signal(number, stop_now)


def stop_now(number: int, frame: FrameType | None = None) -> None:
    """Print one line, on rank 0 only, and exit. No exception is raised, because callbacks from C swallow them."""
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    if os.environ.get("RANK", "0") == "0":
        line = f"error: stopped by {signal.Signals(number).name}\n"
        with suppress(OSError):  # standard error may be closed
            os.write(2, (b"\n" if os.isatty(2) else b"") + line.encode())  # below a progress bar
    os._exit(128 + number)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect signals in a list. The loop inside finishes its step, saves and stops.

    A second signal stops the process at once, unless it follows within `SAME_STOP` seconds, as when a terminal closes,
    or there are several ranks, which get the signals of the terminal and of torchrun.
    """
    requests: list[int] = []
    first = 0.0

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal first
        first = first or time.monotonic()
        if time.monotonic() - first > SAME_STOP and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            handler = earlier[number]
            (handler if callable(handler) else stop_now)(number, frame)  # in a notebook, a KeyboardInterrupt
        requests.append(number)

    main = threading.current_thread() is threading.main_thread()  # others get no signals
    earlier = {number: signal.signal(number, request) for number in _not_ignored() if main}
    try:
        yield requests
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _not_ignored() -> list[int]:
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


# --- standard output and error ---------------------------------------------------------------------------------------


class _Lossy(io.FileIO):
    """A file descriptor that drops what cannot be written, as to a pipe that `head` has closed."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def write(text: str) -> None:
    """Write to standard output. Raises BrokenPipeError if it was closed, and OSError if it cannot be written."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python exits
        if isinstance(error, BrokenPipeError):
            raise
        raise OSError(f"standard output cannot be written: {error.strerror}") from None


# --- exit codes ------------------------------------------------------------------------------------------------------


class NotFinite(ValueError):
    """A loss, a gradient, a weight or a logit is NaN or infinite. In training, `step` says when."""

    code = 5

    def __init__(self, what: str, step: int = 0):
        super().__init__(f"{what} not finite" + (f" at step {step}; try a lower --lr" if step else ""))
        self.step = step


class Stopped(Exception):
    """A signal asked the run to stop, and it has saved."""

    def __init__(self, signum: int, resume_with: str):
        super().__init__(f"stopped by {signal.Signals(signum).name}; continue with {resume_with}")
        self.code = 128 + signum


class CellFailed(Exception):
    """A run that this command started has failed with exit code `code`. `line` is its error or its last line."""

    def __init__(self, cell: str, code: int, line: str):
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code > 0 and line:
            reason = line.removeprefix("error: ") if "error: " in line else f"{reason}; its last line is {line}"
        super().__init__(f"{cell}: {reason}")
        self.code = max(1, code)


@contextmanager
def bad_input() -> Iterator[None]:
    """Raise BadInput for a ValueError or OSError inside, except if memory or disk failed. All ranks must have it."""
    try:
        yield
    except (ValueError, OSError) as error:
        if out_of_memory(error) or (isinstance(error, OSError) and error.errno in DISK_FAILED):
            raise
        raise BadInput(str(error)) from error


@contextmanager
def exit_codes(memory_options: str) -> Iterator[None]:
    """Exit with the code of an error inside. `memory_options` names the flags to change when memory runs out."""
    try:
        yield
    except (BadInput, InUse, NotFinite, Stopped, CellFailed) as error:
        _exit(error.code, str(error), together=True)
    except Exception as error:
        if out_of_memory(error):
            _exit(OUT_OF_MEMORY, f"out of memory; try a smaller {memory_options}")
        if isinstance(error, OSError):  # usually a full disk; every finished checkpoint is intact
            _exit(FAILED, str(error))
        raise


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. On every device torch says that it cannot allocate it, and so does the system."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError | OSError) and "allocate" in str(error))


def _exit(code: int, line: str, together: bool = False) -> None:
    """Print the line and exit. If all ranks do it `together`, rank 0 prints before torchrun sees any of them end."""
    if together:
        from machine import distributed
    if not together or distributed.is_main():
        print(f"error: {one_line(line)}", file=sys.stderr)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is stop_now:  # a signal such as torchrun's adds no other line
            signal.signal(number, lambda number, frame: os._exit(code))
    if together:
        distributed.barrier()
    sys.exit(code)
