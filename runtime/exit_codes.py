"""How a command ends: an exit code and one line instead of a traceback."""

import errno
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from config import one_line
from runtime import distributed
from runtime.plugins import error_line
from runtime.signals import say_nothing_more

FAILED, BAD_INPUT, OUT_OF_MEMORY, IN_USE, NOT_FINITE = 1, 2, 3, 4, 5
SHOWN_ROWS = 8  # of a batch; metrics.jsonl has all of them
DISK_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # full, over a quota or a size limit, or broken


class RunInUse(Exception):
    """Another process is writing to the run directory."""


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
    except RunInUse as error:
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
    with distributed.printed_by_main():
        _exit(code, line)


def _exit(code: int, line: str) -> None:
    print(f"error: {one_line(line)}", file=sys.stderr)
    say_nothing_more()
    sys.exit(code)
