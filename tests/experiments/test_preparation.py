"""bench.py prepare: the report adds up, and the text it generates is gone afterwards."""

import json
import subprocess
import sys

import pytest

import bench
from experiments.preparation import children_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def report_of(flags: str, folder, monkeypatch) -> dict:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    bench.main(f"prepare --device cpu --rounds 1 --encode-megabytes 1 {flags} --out {folder}/report.json".split())
    assert [path.name for path in folder.iterdir()] == ["report.json"]
    return json.loads((folder / "report.json").read_text())


@pytest.mark.slow
def test_preparing_bytes_is_measured(tmp_path, monkeypatch):
    report = report_of("--megabytes 3 --tokenizer bytes --format jsonl", tmp_path, monkeypatch)
    assert report["text"].startswith("3 MB of jsonl") and report["processes"] == 1
    assert 50 < report["of which after imports MiB"] < report["peak MiB of all processes"] < 1000
    assert 0 < report["prepared MB/s"] < 3 / report["seconds to prepare"] * 1.1


@pytest.mark.slow
def test_encoding_is_measured_with_one_process_and_several(tmp_path, monkeypatch):
    report = report_of("--megabytes 20 --vocab-size 500", tmp_path, monkeypatch)
    assert report["processes"] > 1
    assert len(report["rows"]) == 6 and all(row["MB/s"] > 0 for row in report["rows"])


# A process with two children: one runs a program of its own, the other has only been forked.
FAMILY = """
import os, subprocess, sys
wait = "import sys; sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", wait])
if os.fork():
    print(child.pid, flush=True)
sys.stdin.read()
"""


def test_memory_before_a_child_starts_is_not_counted_twice():
    process = subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    child = int(process.stdout.readline())
    try:
        assert children_of(process.pid) == [child]
    finally:
        process.communicate()  # closes their standard input, so all of them end


def test_a_bad_size_ends_with_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["prepare", "--megabytes", "0"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: --megabytes must be at least 1, not 0\n"
