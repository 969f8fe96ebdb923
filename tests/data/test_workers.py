"""Text encoded in several processes has the ids that one process gives it, and no process outlives its parent."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from data import tokens as token_files
from data import workers
from data.corpus import open_corpus
from data.tokenizer import SentencePieceTokenizer, train_tokenizer
from data.tokens import write_tokens
from data.workers import encode_job, encode_jobs, make_jobs, text_of

ROOT = Path(__file__).parents[2]
DTYPE = np.dtype("<u2")
DOCUMENTS = [
    [f"def f{number}(x):\n" * (number % 9 + 1), f"    return x + {number}  # é 😀 \u2581 <s>\n"]
    for number in range(500)
] + [["\0", "one line " * 3000], ["語" * 5000], ["a"]]


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceTokenizer:
    return train_tokenizer(["".join(document) for document in DOCUMENTS], 700)


@pytest.fixture
def started(monkeypatch) -> list[workers.Worker]:
    """The processes that were started."""
    processes: list[workers.Worker] = []

    def start(dtype: np.dtype) -> workers.Worker:
        processes.append(original(dtype))
        return processes[-1]

    original = workers._start
    monkeypatch.setattr(workers, "_start", start)
    return processes


def ids_of(tokenizer: SentencePieceTokenizer) -> list[int]:
    """The ids of all documents, straight from the tokenizer."""
    ids = []
    for document in DOCUMENTS:
        for chunk in document:
            ids += tokenizer.encode(chunk)
        ids.append(tokenizer.end_of_document)
    return ids


@pytest.mark.parametrize("job_bytes", [1, 1000, 1 << 20])
def test_jobs_hold_the_text_and_give_its_ids(tokenizer, monkeypatch, job_bytes):
    monkeypatch.setattr(workers, "JOB_BYTES", job_bytes)
    jobs = list(make_jobs(DOCUMENTS))
    assert b"".join(map(text_of, jobs)).decode() == "".join("".join(document) for document in DOCUMENTS)
    assert len(jobs) > 1 or job_bytes > 1000
    assert all(len(job) <= job_bytes + 30_000 for job in jobs)
    ids = b"".join(encode_job(job, tokenizer, DTYPE) for job in jobs)
    assert np.frombuffer(ids, DTYPE).tolist() == ids_of(tokenizer)


def test_several_processes_give_the_same_ids_in_the_same_order(tokenizer, monkeypatch, started):
    monkeypatch.setattr(workers, "JOB_BYTES", 1000)
    jobs = list(make_jobs(DOCUMENTS))
    encoded = list(encode_jobs(jobs, tokenizer, DTYPE, 3))
    assert len(started) == 3 and len(jobs) > 50
    assert [job for job, _ in encoded] == jobs
    assert np.frombuffer(b"".join(ids for _, ids in encoded), DTYPE).tolist() == ids_of(tokenizer)
    assert all(process.returncode is not None for process in started)


def test_the_processes_do_not_import_torch():
    script = "import sys, data.workers; sys.exit(sum(name in sys.modules for name in ('torch', 'multiprocessing')))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_few_jobs_are_ahead_of_the_reader(tokenizer, started):
    """So memory does not grow with the text."""
    read = 0

    def jobs() -> Iterator[bytes]:
        nonlocal read
        for job in repeat(b"a job\xfe\xff"):
            read += 1
            yield job

    encoded = encode_jobs(jobs(), tokenizer, DTYPE, 2)
    for _ in range(20):
        next(encoded)
    assert read <= 20 + 2 * 2 + 1
    encoded.close()
    assert all(process.returncode is not None for process in started)


def test_a_process_that_is_killed_ends_the_work_with_one_line(tokenizer, started):
    encoded = encode_jobs(repeat(b"a job\xfe\xff"), tokenizer, DTYPE, 2)
    next(encoded)
    started[1].kill()
    with pytest.raises(ChildProcessError, match=r"^a process that encodes the text was killed by SIGKILL; .*$"):
        for _ in encoded:
            pass
    assert all(process.returncode is not None for process in started)


@pytest.mark.parametrize(("text_bytes", "expected"), [(1000, 1), (10**9, 5), (10**12, 5)])
def test_a_small_text_starts_no_process(tokenizer, monkeypatch, text_bytes, expected):
    monkeypatch.setattr(token_files, "available_cpus", lambda: 5)
    assert token_files._worker_count(text_bytes, tokenizer) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the CPUs of a process cannot be limited here")
def test_only_cpus_that_this_process_may_use_are_counted():
    cpus = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cpus)})
        assert workers.available_cpus() == 1
    finally:
        os.sched_setaffinity(0, cpus)
    assert workers.available_cpus() == len(cpus)


# --- whole commands ---------------------------------------------------------------------------------------------------

# Encode a text in two processes, as prepare() does in train.py. Progress is saved often.
ENCODE = """
import sys
from pathlib import Path
from data import tokens, workers
from data.corpus import open_corpus
from data.tokenizer import load_tokenizer
from runtime.process import bad_input, exit_codes
tokens.available_cpus, tokens.PARALLEL_BYTES, tokens.SAVE_BYTES, workers.JOB_BYTES = lambda: 2, 0, 1 << 18, 1 << 16
folder = Path(sys.argv[2])
with exit_codes(""), bad_input():
    tokens.write_tokens(folder / "train.bin", open_corpus(sys.argv[1:2], folder), "train", load_tokenizer("sentencepiece", folder))
"""  # noqa: E501


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text("".join(f"line {number} of {number * 7}\n" for number in range(400_000)))
    return path


def start_encoding(text: Path, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", ENCODE, str(text), str(folder)]
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job ignores it, and its children do
    try:
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)


def wait_until_encoding(process: subprocess.Popen, path: Path, size: int = 1 << 17) -> bool:
    """Whether the process has written `size` bytes and goes on."""
    while process.poll() is None:
        if path.exists() and path.stat().st_size > size:
            return True
        time.sleep(0.01)
    return False


def children_of(process: subprocess.Popen) -> list[int]:
    lists = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL", "child"])
def test_a_stopped_command_leaves_no_process_and_says_why(text, tokenizer, tmp_path, how):
    tokenizer.save(tmp_path)
    process = start_encoding(text, tmp_path)
    assert wait_until_encoding(process, tmp_path / "train.bin"), "ended before it could be stopped"
    children = children_of(process)
    assert len(children) == 2
    assert all(os.getsid(child) == child for child in children), "Ctrl-C must not reach them"
    if how == "child":
        os.kill(children[0], signal.SIGKILL)
    elif how == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    else:
        process.send_signal(getattr(signal, how))
    _, errors = process.communicate(timeout=30)  # the children share its standard error, so it ends when they have
    if how == "child":
        line = "error: a process that encodes the text was killed by SIGKILL; the same command continues from there\n"
        assert (process.returncode, errors) == (1, line)
    elif how == "SIGINT":
        assert (process.returncode, errors) == (130, "error: interrupted\n")
    else:
        assert (process.returncode, errors) == (-getattr(signal, how), "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
def test_commands_killed_at_random_moments_end_with_the_same_file(text, tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    corpus, path = open_corpus([str(text)], tmp_path), tmp_path / "train.bin"
    write_tokens(tmp_path / "undisturbed.bin", corpus, "train", tokenizer)
    rng, kills, sizes = random.Random(0), 0, [1024]
    while wait_until_encoding(process := start_encoding(text, tmp_path), path, sizes[-1] + (1 << 18)):
        time.sleep(0.1 * rng.random())
        os.kill(rng.choice([process.pid, *children_of(process)]), signal.SIGKILL)
        process.communicate(timeout=30)
        kills += 1
        sizes.append(path.stat().st_size)
    assert process.communicate(timeout=30) == (None, "") and process.returncode == 0
    assert kills >= 3, sizes
    assert path.read_bytes() == (tmp_path / "undisturbed.bin").read_bytes()
