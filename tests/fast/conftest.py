"""Where the C code cannot be used, nothing in this folder is collected, and a line at the end of the run says why."""

from typing import Any

from model import Llama
from runtime.acceleration import accelerate

reason = accelerate(Llama(layers=1).eval())
collect_ignore_glob = ["test_*.py"] if reason else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if reason:
        terminalreporter.write_line(f"tests/fast not run: {reason}")
