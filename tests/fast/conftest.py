"""Where the C code cannot be built, its tests are not collected, and a line at the end of the run says why."""

from typing import Any

import torch

from fast.native import load

reason = load(torch.float32)[1] or ""
unsupported = reason.startswith("fast/ needs Linux") or reason == "gcc was not found"  # for another reason, tests fail
collect_ignore = ["test_decode.py"] if unsupported else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if reason:
        terminalreporter.write_line(f"tests of C in tests/fast not run: {reason}")
