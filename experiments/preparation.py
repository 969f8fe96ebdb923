"""How fast text is prepared for training, and in how much memory: `python bench.py prepare`."""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from data.workers import available_cpus, encode_jobs, make_jobs

from config import check_sizes, option, require
from data.corpus import open_corpus
from data.prepare import prepare
from data.tokenizer import SentencePieceTokenizer, Tokenizer, train_tokenizer
from experiments.benchmarks import BenchConfig, Call, Report, time_alternately

SAMPLE_SECONDS = 0.05  # between two looks at the memory in use
CONTEXT = 256
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(BenchConfig):
    """Options of `prepare`."""

    megabytes: int = option(1000, "size of the text, which is generated in a temporary folder and deleted")
    format: str = option("txt", "one text file, or one .jsonl file", choices=["txt", "jsonl"])
    tokenizer: str = option("sentencepiece", "as in train.py", choices=["sentencepiece", "bytes"])
    vocab_size: int = option(8192, "as in train.py")
    encode_megabytes: int = option(10, "size of the text that is encoded in each round to measure speed alone")
    rounds: int = option(3, "rounds of measuring speed alone")

    def __post_init__(self) -> None:
        check_sizes(self, "megabytes", "vocab_size", "encode_megabytes", "rounds")
        require(Path("/proc/self/status").exists(), "bench.py prepare reads memory from /proc, which Linux alone has")


def bench_prepare(config: PrepareConfig, device: torch.device) -> Report:
    """Measure preparing a text: speed with one process and with several, and the peak memory of all of them."""
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as name:
        folder = Path(name)
        rows = encoding_speeds(config, folder, device)
        text = folder / f"text.{config.format}"
        size = write_text(text, config.megabytes * 10**6)
        started = time.perf_counter()
        idle, peak, processes = prepare_elsewhere(config, text)
        seconds = time.perf_counter() - started
    return {
        "text": f"{size / 1e6:.0f} MB of {config.format}, tokenizer {config.tokenizer}",
        "seconds to prepare": round(seconds, 1),
        "prepared MB/s": round(size / 1e6 / seconds, 1),
        "processes": processes,
        "peak MiB of all processes": round(peak / 1024),
        "of which after imports MiB": round(idle / 1024),
        "rows": rows,
    }


def write_text(path: Path, size: int) -> int:
    """Repeat the standard library with a number in each page, so that no two documents are equal. Returns the size."""
    pages = ["".join(document) for document in open_corpus(["python"], path.parent).documents("train")]
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            for page in pages:
                text = f"# {written}\n{page}"
                file.write(json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text)
                written += len(text.encode())
                if written >= size:
                    break
    return written


def encoding_speeds(config: PrepareConfig, folder: Path, device: torch.device) -> list[dict[str, object]]:
    """Encode the same text in one process, with one thread and with all, and in several processes."""
    corpus = open_corpus(["python"], folder)
    documents = [["".join(document)] for document in corpus.documents("train")]
    short = [[text[start : start + 1000]] for (text,) in documents for start in range(0, len(text), 1000)]
    if config.tokenizer == "bytes":
        return [{"encoding": "not measured alone: the byte tokenizer uses one process"}]
    tokenizer = train_tokenizer((text for (text,) in documents), config.vocab_size)
    one = SentencePieceTokenizer(tokenizer.model, threads=1)
    cpus = max(2, available_cpus())
    rows: list[dict[str, object]] = []
    for name, texts in (("files", documents), ("1 KB each", short)):
        jobs = list(islice(make_jobs(texts), config.encode_megabytes))
        size = sum(map(len, jobs))

        calls: dict[str, Call] = {
            "1 process, 1 thread": partial(_encode, jobs, one, 1),
            "1 process": partial(_encode, jobs, tokenizer, 1),
            f"{cpus} processes": partial(_encode, jobs, tokenizer, cpus),
        }
        seconds = time_alternately(calls, config.rounds, device)
        base = seconds["1 process, 1 thread"]
        for call, taken in seconds.items():
            rows.append(
                {
                    "encoding": f"{name}: {call}",
                    "MB/s": round(size / 1e6 / taken, 2),
                    "ratio": round(base / taken, 2),
                }
            )
    return rows


def _encode(jobs: list[bytes], tokenizer: Tokenizer, workers: int) -> None:
    for _ in encode_jobs(jobs, tokenizer, np.dtype("<u2"), workers):
        pass


# --- memory ----------------------------------------------------------------------------------------------------------


def prepare_elsewhere(config: PrepareConfig, text: Path) -> tuple[int, int, int]:
    """Prepare in a new process. Returns its KiB before it starts, the peak KiB of it and its children, and how many
    processes there were.
    """
    vocabulary = str(config.vocab_size)
    command = [sys.executable, "-m", "experiments.preparation", str(text), config.tokenizer, vocabulary]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    try:
        process.stdout.readline()  # it has imported everything
        idle = resident_kib(process.pid)
        process.stdin.close()
        peak, most = 0, 0
        while process.poll() is None:
            family = [process.pid, *children_of(process.pid)]
            peak, most = max(peak, sum(map(resident_kib, family))), max(most, len(family))
            time.sleep(SAMPLE_SECONDS)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    require(process.returncode == 0, f"preparing {text} ended with exit code {process.returncode}")
    return idle, peak, most


def children_of(pid: int) -> list[int]:
    """The children that run a program of their own. Before it starts, a child has its parent's memory, not more."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in lists for child in _read(path).split()]
    return [child for child in children if _command(child) != _command(pid)]


def _command(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline"))


def resident_kib(pid: int) -> int:
    """Resident memory of a process, 0 if it has ended. Pages that processes share count in each."""
    lines = [line for line in _read(Path(f"/proc/{pid}/status")).splitlines() if line.startswith("VmRSS")]
    return int(lines[0].split()[1]) if lines else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended
        return ""


if __name__ == "__main__":
    print("imported", flush=True)
    sys.stdin.read()
    prepare([sys.argv[1]], sys.argv[2], int(sys.argv[3]), Path(sys.argv[1]).parent / "cache", CONTEXT)
