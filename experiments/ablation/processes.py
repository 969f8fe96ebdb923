"""Runs of `train.py` in processes of their own, on one device or on several cards."""

import os
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread

from config import require
from runtime.device import describe, pick_device

LAST_LINES_SECONDS = 5  # for what a process has printed, should a process that it started keep its standard error open


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
    """A command with that many CPU threads, whose output is appended to `log`.

    Why it failed is also kept in memory, because the log may be on a disk that is full.
    """

    def __init__(self, command: list[str], log: Path, threads: int):
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        with open(log, "a") as file:
            super().__init__(
                [*end_with_parent(), *command],
                env=os.environ | dict.fromkeys(names, str(threads)),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
            )
        self.reason = ""
        self.reader = Thread(target=self.read_errors, args=(log,), daemon=True)
        self.reader.start()

    def read_errors(self, log: Path) -> None:
        """Copy standard error to `log`. The reason is its error line or, without one, its last line."""
        assert self.stderr
        with self.stderr:
            for line in self.stderr:
                text = line.decode(errors="replace").strip()
                if text and not self.reason.startswith("error: "):
                    self.reason = text
                with suppress(OSError), open(log, "ab") as file:
                    file.write(line)

    def finish(self) -> str:
        """Wait for its end. Returns the reason if it failed."""
        self.wait()
        self.reader.join(LAST_LINES_SECONDS)
        return self.reason


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
