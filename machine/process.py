"""How a command starts, is stopped by signals, prints, and ends. Only the standard library is imported here.

A command calls `start` before it imports torch, which takes seconds, in which a signal must not end in a traceback.
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

from files import DISK_FAILED, BadInput, Ended, one_line

FAILED, OUT_OF_MEMORY = 1, 3  # other exit codes are those of exceptions
PACKAGES = ("torch", "numpy", "sentencepiece", "safetensors", "tqdm", "matplotlib")
SETUP = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && .venv/bin/python train.py"
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
SAME_STOP = 1.0  # seconds in which several signals count as one, as when a terminal closes


# --- starting --------------------------------------------------------------------------------------------------------


def start(may_close: Sequence[str] = ("stdout", "stderr")) -> None:
    """Prepare the process of a command, which continues when the reader of one of the streams `may_close` leaves.

    They escape characters that the locale cannot encode.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # libgomp's own number slows down a busy machine several times
    if hasattr(sys, "ps1"):  # %run in IPython, which goes on afterwards and keeps its signals and streams
        return
    stop_at_signals()
    if missing := missing_packages():
        _print_error(missing)
        sys.exit(BadInput.code)
    os.environ.pop("MPLBACKEND", None)  # plots go to files; a notebook's own backend may be missing
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not stream:  # the command was started with it closed
            stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False)
        if name in may_close:
            lossy = io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False))
            stream = io.TextIOWrapper(lossy, stream.encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)


def missing_packages() -> str:
    """A line about packages that this Python lacks, or nothing."""
    missing = ", ".join(name for name in PACKAGES if find_spec(name) is None)
    return missing and f"{sys.executable} has no {missing}; use the virtual environment: {SETUP}"


class _Lossy(io.FileIO):
    """A file descriptor that drops what cannot be written, as to a pipe that `head` has closed."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return len(data)


def write(text: str) -> None:
    """Write to standard output. Raises BrokenPipeError if it was closed, and OSError if it cannot be written."""
    try:
        print(text, end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it when it exits
        raise


# --- signals ---------------------------------------------------------------------------------------------------------


def stop_at_signals() -> None:
    """From now on a signal ends this process. Ignored signals stay ignored, such as SIGHUP under nohup."""
    for number in _not_ignored():
        signal.signal(number, stop_now)


def stop_now(number: int, frame: FrameType | None) -> None:
    """Print one line, on rank 0 only, and exit. No exception is raised, because callbacks from C swallow them."""
    if os.environ.get("RANK", "0") == "0":
        line = f"error: stopped by {signal.Signals(number).name}\n"
        with suppress(OSError):  # standard error may be closed
            os.write(2, (b"\n" if os.isatty(2) else b"") + line.encode())  # below a progress bar
    os._exit(128 + number)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect signals in a list. The loop inside finishes its step, saves and stops.

    A later one has its usual effect, except with several ranks, which get the signals of the terminal and of torchrun.
    """
    requests: list[int] = []
    times: list[float] = []

    def request(number: int, frame: FrameType | None) -> None:
        requests.append(number)
        times.append(time.monotonic())
        if times[-1] > times[0] + SAME_STOP and os.environ.get("WORLD_SIZE", "1") == "1":
            signal.signal(number, earlier[number])
            signal.raise_signal(number)  # stops a command; a KeyboardInterrupt in a notebook

    main = threading.current_thread() is threading.main_thread()  # others get no signals
    earlier = {number: signal.signal(number, request) for number in _not_ignored() if main}
    try:
        yield requests
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _not_ignored() -> list[int]:
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


# --- exit codes ------------------------------------------------------------------------------------------------------


class NotFinite(Ended, ValueError):
    """A loss, a gradient, a weight or a logit is NaN or infinite. In training, `step` says when."""

    code = 5

    def __init__(self, message: str, step: int = 0):
        super().__init__(message)
        self.step = step


class Stopped(Ended):
    """A signal, or what is named in `by`, asked the run to stop, and it has saved."""

    def __init__(self, signum: int, resume_with: str, by: str = ""):
        super().__init__(f"stopped by {by or signal.Signals(signum).name}; continue with {resume_with}")
        self.code = 128 + signum


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
    except Ended as error:  # every rank has it
        from machine import distributed

        if distributed.is_main():
            _print_error(error)
        distributed.all_gather(None)  # rank 0 prints before torchrun sees any of them end
        sys.exit(error.code)
    except Exception as error:
        if out_of_memory(error):
            named = str(error).startswith("out of memory")  # with the file that was read
            _print_error(error if named else f"out of memory; try a smaller {memory_options}")
            sys.exit(OUT_OF_MEMORY)
        if isinstance(error, OSError):  # usually a full disk; every finished checkpoint is intact
            if error.errno or os.environ.get("RANK", "0") == "0":  # another rank's has no number
                _print_error(error)
            sys.exit(FAILED)
        raise


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, by what torch, CUDA, Triton, cuBLAS and the system say then."""
    said = str(error) if isinstance(error, RuntimeError | OSError) else ""
    words = ("allocate", "out of memory", "ALLOC_FAILED", "MemoryError")  # the last within an error of torch.compile
    return isinstance(error, MemoryError) or any(word in said for word in words)


def _print_error(line: object) -> None:
    print(f"error: {one_line(str(line))[:1600]}", file=sys.stderr)  # a screen at most
