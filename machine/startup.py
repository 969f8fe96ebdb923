"""Imported first by a command, it prepares the process before packages load for seconds. Otherwise it does nothing."""

import sys
from collections.abc import Sequence
from pathlib import Path

from machine.process import start

BOTH = ("stdout", "stderr")  # the streams that may be closed while a command goes on
COMMANDS: dict[str, Sequence[str]] = {"train.py": BOTH, "generate.py": BOTH[1:], "ablate.py": BOTH, "bench.py": BOTH}

main = Path(getattr(sys.modules["__main__"], "__file__", None) or "notebook").resolve()
if main.parent == Path(__file__).parents[1] and main.name in COMMANDS:
    start(COMMANDS[main.name])
