"""How a command ends: exit codes with one line each, where a traceback would help nobody."""

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BAD_INPUT, OUT_OF_MEMORY, IN_USE, NOT_FINITE = 2, 3, 4, 5


class RunInUse(Exception):
    """Another process is writing to the run's folder."""


class NotFinite(Exception):
    """The loss or a gradient is infinite or not a number since `step`."""

    def __init__(self, step: int):
        super().__init__(f"loss or gradient is no longer finite at step {step}; try a lower --lr")
        self.step = step


class Stopped(Exception):
    """A signal asked the run to stop, and it has saved."""

    def __init__(self, signum: int, go_on: str = "--resume"):
        super().__init__(f"stopped by {signal.Signals(signum).name}; go on with {go_on}")
        self.signum = signum


class CellFailed(Exception):
    """A run that this command started has gone wrong, and ended with exit code `code`."""

    def __init__(self, cell: str, code: int, complaint: str):
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else complaint
        super().__init__(f"{cell}: {how.removeprefix('error: ')}")
        self.code = max(1, code)


@contextmanager
def bad_input() -> Iterator[None]:
    """Around reading what the user gave: a ValueError or OSError there is theirs, and ends with exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        _leave(BAD_INPUT, str(error))


@contextmanager
def exit_codes(memory_knobs: str) -> Iterator[None]:
    """Around the work itself; `memory_knobs` says which flags to turn when memory runs out."""
    try:
        yield
    except RunInUse as error:
        _leave(IN_USE, str(error))
    except NotFinite as error:
        _leave(NOT_FINITE, str(error))
    except Stopped as error:
        _leave(128 + error.signum, str(error))
    except CellFailed as error:
        _leave(error.code, str(error))
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT, "interrupted")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):  # torch's word for it, on every device
            raise
        _leave(OUT_OF_MEMORY, f"out of memory; try a smaller {memory_knobs}")
    except OSError as error:  # a full disk, most often; every checkpoint there is whole
        _leave(1, str(error))


def _leave(code: int, line: str) -> None:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)


def as_command(main: Callable[[], None]) -> None:
    """`main()` in a process of its own.

    What the imports made is there to stay: Python need not look through it again for what could be freed, least of all
    when the process ends, which takes 0.3 s after torch.
    """
    gc.freeze()
    main()
