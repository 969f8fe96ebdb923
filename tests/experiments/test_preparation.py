"""bench.py prepare: the report adds up, and the text it generates is gone afterwards."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import bench
from experiments import preparation
from experiments.preparation import PrepareConfig, children_of

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


def test_the_report_by_hand(tmp_path, monkeypatch, capsys):
    """3 MB, of which 2.9 are written, in 2 seconds, with a peak of 500 MiB."""
    now = [0.0]

    def prepare_elsewhere(config, text) -> tuple[int, int, int]:
        now[0] += 2
        return 100 * 1024, 500 * 1024, 3

    monkeypatch.setattr(preparation.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(preparation, "encoding_speeds", lambda config, folder, device: [{"encoding": "none"}])
    monkeypatch.setattr(preparation, "write_text", lambda path, size: size - 10**5)
    monkeypatch.setattr(preparation, "prepare_elsewhere", prepare_elsewhere)
    report = preparation.bench_prepare(PrepareConfig(megabytes=3), torch.device("cpu"))
    assert list(report.values())[:6] == [
        "3 MB of txt, tokenizer sentencepiece", 2.0, 1.4, 3, 500, 100,
    ]  # fmt: skip


def test_encoding_speeds_by_hand(tmp_path, monkeypatch):
    """Two jobs of 3 and 5 MB: 8 MB in 4, 2 and 1 seconds."""
    monkeypatch.setattr(preparation, "open_corpus", lambda names, folder: Corpus(["text. " * 50]))
    monkeypatch.setattr(preparation, "train_tokenizer", lambda texts, size: SimpleNamespace(model=b""))
    monkeypatch.setattr(preparation, "SentencePieceTokenizer", lambda model, threads: None)
    monkeypatch.setattr(preparation, "make_jobs", lambda texts: [bytes(3 * 10**6), bytes(5 * 10**6)])
    seconds = iter([4.0, 2.0, 1.0] * 2)
    monkeypatch.setattr(preparation, "time_alternately", lambda calls, *rest: {name: next(seconds) for name in calls})
    rows = preparation.encoding_speeds(PrepareConfig(), tmp_path, torch.device("cpu"))
    assert [(row["MB/s"], row["ratio"]) for row in rows] == [(2.0, 1.0), (4.0, 2.0), (8.0, 4.0)] * 2


class Corpus:
    def __init__(self, texts: list[str]):
        self.texts = texts

    def documents(self, split: str) -> list[list[str]]:
        return [[text] for text in self.texts]


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_the_text_is_as_large_as_asked_for_and_no_document_is_there_twice(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "open_corpus", lambda names, folder: Corpus(["größer\n" * 3, "b\n" * 4]))
    path = tmp_path / f"text.{suffix}"
    size = preparation.write_text(path, 200)
    text = path.read_text("utf-8")
    documents = [json.loads(line)["text"] for line in text.splitlines()] if suffix == "jsonl" else [text]
    assert size == sum(len(document.encode()) for document in documents) and 200 <= size < 240
    marks = re.findall(r"# \d+", " ".join(documents))
    assert len(marks) == len(set(marks)) > 5


def test_memory_is_that_of_the_process_and_its_children(tmp_path, monkeypatch):
    """The process has 100 KiB, as it says that it has imported everything, and 200 later; two children have 50 each."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho imported\ncat > /dev/null\nsleep 0.3\n")
    program.chmod(0o755)
    monkeypatch.setattr(preparation.sys, "executable", str(program))
    monkeypatch.setattr(preparation, "children_of", lambda pid: [-1, -2])
    own = iter([100])
    monkeypatch.setattr(preparation, "resident_kib", lambda pid: 50 if pid < 0 else next(own, 200))
    assert preparation.prepare_elsewhere(PrepareConfig(), tmp_path / "text.txt") == (100, 300, 3)


# A process with two children: one runs a program of its own, the other has only been forked.
FAMILY = """
import os, subprocess, sys
wait = "import sys; sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", wait, b"not UTF-8: \\xe9"])
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
