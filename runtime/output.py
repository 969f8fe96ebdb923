"""Standard output and error: they may be closed, their reader may leave, or their disk may be full."""

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any


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
