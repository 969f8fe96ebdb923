"""Without the kernels, nothing in this folder is collected, and a line at the end of the run says why."""

from typing import Any

from runtime.acceleration import unavailable

reason = unavailable()
collect_ignore_glob = ["test_*.py"] if reason else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if reason:
        terminalreporter.write_line(f"tests/fast not run: {reason}")
