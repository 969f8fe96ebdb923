"""Runs of `train.py` in processes of their own, on one device or on several cards."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from config import require
from runtime.device import describe, pick_device

LINE_BYTES = 4096  # an error line, and what the file system adds


def resolve_devices(device: str) -> tuple[str, ...]:
    """The devices that `--device` names: ("cuda:0", "cuda:1") for "cuda:0,1".

    Raises ValueError if this machine does not have one of them, or if they are different kinds of cards.
    """
    kind, _, indices = device.partition(":")
    devices = tuple(f"{kind}:{index}" for index in indices.split(",")) if "," in indices else (device,)
    names = {describe(pick_device(name)) for name in devices}
    require(len(set(devices)) == len(devices), f"--device {device} names a card twice; use --jobs for runs per card")
    require(len(names) == 1, f"--device {device} mixes {' and '.join(sorted(names))}; runs on both are not comparable")
    return devices


class Process(subprocess.Popen):
    """A command with that many CPU threads, whose output is appended to `log`."""

    def __init__(self, command: list[str], log: Path, threads: int):
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        with open(log, "ab") as file:
            self.log, self.log_size = log, file.tell()
            super().__init__(
                [*end_with_parent(), *command],
                env=os.environ | dict.fromkeys(names, str(threads)),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
            )

    def last_line(self) -> str:
        """The error line that it printed, or else its last line. On a full disk there may be neither."""
        with open(self.log, "rb") as file:
            file.seek(self.log_size)
            lines = file.read().decode(errors="replace").split("\n")
        lines = [line for line in map(str.strip, lines) if line]
        errors = [line for line in lines if line.startswith("error: ")]
        free = shutil.disk_usage(self.log.parent).free
        if not errors and free < LINE_BYTES:
            return f"error: it failed, and could not say why: {self.log.parent} has {free} bytes free"
        return (errors or lines or [""])[-1]


@cache
def end_with_parent() -> tuple[str, ...]:
    """A prefix of a command with which it gets SIGTERM when this process is killed. Empty where Linux's `setpriv` is
    missing: there the command continues.

    Each thread of this process may cause another signal, so a run may stop at once, without saving.
    """
    prefix = ("setpriv", "--pdeathsig", "TERM")
    try:
        supported = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    except OSError:
        supported = False
    return prefix if supported else ()
