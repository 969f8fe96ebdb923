"""What a command does on its first line. Only the standard library is imported here: other imports take seconds."""

import os

from runtime.signals import stop_at_signals


def start() -> None:
    """End at signals with one line, and draw plots into files only."""
    stop_at_signals()
    os.environ.pop("MPLBACKEND", None)  # a notebook sets it to its own, which may be missing here
