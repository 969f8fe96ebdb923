"""Runs of `train.py` in processes of their own, on one device or on several cards."""

import os
import subprocess
from pathlib import Path
from shutil import which

from config import require
from runtime.device import describe, pick_device

END_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM") if which("setpriv") else ()


def resolve_devices(device: str) -> tuple[str, ...]:
    """The devices that `--device` names: ("cuda:0", "cuda:1") for "cuda:0,1".

    Raises ValueError if this machine does not have one of them, or if they are different kinds of cards.
    """
    kind, _, indices = device.partition(":")
    devices = tuple(f"{kind}:{index}" for index in indices.split(",")) if "," in indices else (device,)
    names = {describe(pick_device(name)) for name in devices}
    require(len(names) == 1, f"--device {device} mixes {' and '.join(sorted(names))}; runs on both are not comparable")
    return devices


def start_process(command: list[str], log: Path, threads: int) -> subprocess.Popen:
    """Start a command with this many CPU threads, whose output is appended to `log`.

    Where Linux's `setpriv` is installed, it gets SIGTERM when this process is killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        return subprocess.Popen(
            [*END_WITH_PARENT, *command],
            env=os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
        )


def last_line(log: Path) -> str:
    """The last error line in `log`, or else its last line."""
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]
