"""Text that is damaged or too short: one line names the file or the flag, and no run is created."""

import gzip
import os
import re
from pathlib import Path

import pytest

import train

LINES = "".join(f"line {number} of a text, 日本語 and é\n" for number in range(60)).encode()
REFUSED = {
    "a.txt": (LINES + b"\xff", f"a.txt: not UTF-8 at byte {len(LINES)}; convert or remove it"),
    "a\nb.txt": (LINES.decode().encode("utf-16"), r"a\\nb.txt: not UTF-8 at byte 0"),
    os.fsdecode(b"\xff.txt"): (b"\xff", r"\\udcff.txt: not UTF-8 at byte 0"),
    "b.txt.gz": (gzip.compress(LINES)[:-9], "b.txt.gz: not a valid gzip file"),
    "f.txt": (b"short", "--data .*f.txt: the training text has at most 6 tokens, but --context 32 needs 33"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_data_is_refused_before_a_run_is_created(tmp_path, ends, name):
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    flags = f"--dim 8 --layers 1 --heads 2 --context 32 --steps 1 --device cpu --out {tmp_path / 'run'}".split()
    code, error = ends(train.main, [*flags, "--cache-dir", str(tmp_path / "cache"), "--data", str(tmp_path / name)])
    assert code == 2 and re.match(rf"error: .*{message}", error.splitlines()[-1]), error
    assert not Path(tmp_path, "run").exists()
