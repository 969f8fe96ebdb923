"""What the project is made of: the packages in requirements.txt, pinned and with their licenses, and nothing else."""

import re
import sys
from pathlib import Path

from machine.process import PACKAGES

ROOT = Path(__file__).parents[2]


def test_nothing_else_is_imported():
    """At the top of a file, apart from the standard library and our own packages."""
    required = set(re.findall(r"^([\w-]+)==[\d.]+ +# \w", (ROOT / "requirements.txt").read_text(), re.M))
    assert required >= set(PACKAGES)
    sources = [path for folder in ("data", "machine", "norms", "pages", "runtime") for path in (ROOT / folder).rglob("*.py")]
    for path in [*ROOT.glob("*.py"), *sources]:
        names = set(re.findall(r"^(?:import|from) (\w+)", path.read_text("utf-8"), re.M)) - sys.stdlib_module_names
        assert {name for name in names if not list(ROOT.glob(f"{name}*"))} <= required, path
