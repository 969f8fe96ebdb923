"""Runs of `train.py` in processes of their own, on one device or on several cards."""

import os
import subprocess
from functools import cache
from pathlib import Path

from config import require
from runtime.device import describe, pick_device


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


def start_process(command: list[str], log: Path, threads: int) -> subprocess.Popen:
    """Start a command with that many CPU threads. Its output is appended to `log`."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    with open(log, "a") as file:
        return subprocess.Popen(
            [*end_with_parent(), *command],
            env=os.environ | dict.fromkeys(names, str(threads)),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
        )


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
