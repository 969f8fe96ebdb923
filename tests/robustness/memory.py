"""How much memory a process takes for a piece of work. Linux only."""

from collections.abc import Callable
from pathlib import Path


def megabytes_for(work: Callable[[], object]) -> float:
    """The peak of resident memory during `work()`, minus that before it, in MB."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / (1 << 10)


def _status(field: str) -> int:
    """A field of this process's status, in KiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0])
