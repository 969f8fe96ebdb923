"""How much memory a process takes for a piece of work."""

import resource
import sys
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")


def megabytes_for(work: Callable[[], object]) -> float:
    """The peak of resident memory during `work()`, minus that before it, in MB.

    On Linux the peak is reset first. ru_maxrss alone would not do: a new process inherits it from the one that starts
    it, here pytest with all its modules.
    """
    if not STATUS.exists():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return grown / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / (1 << 10)


def _status(field: str) -> int:
    """A field of this process's status, in KiB."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[field].split()[0])
