import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from runtime.process import outlive_readers

outlive_readers()
for number in range(3):
    print(number, flush=True)
print("the end", file=sys.stderr)
"""


def errors_of(output: int) -> str:
    """What PROGRAM prints on standard error if `output` is its standard output."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_reader_may_leave():
    reading, writing = os.pipe()
    os.close(reading)
    assert errors_of(writing) == "the end\n"
    os.close(writing)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device of Linux that is always full")
def test_output_that_cannot_be_written_is_warned_about_once():
    with open("/dev/full", "wb") as full:
        errors = errors_of(full.fileno())
    assert errors == "warning: standard output is lost: No space left on device\nthe end\n"
