"""The GPU benchmark suite, most important part first: `python bench.py gpu`.

A part runs a few commands of this project. Each part is limited to `PART_SECONDS`, to fit into a short GPU session.
`python bench.py gpu --toy --device cpu` rehearses the same commands at sizes that a CPU finishes in minutes.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from config import option
from experiments.benchmarks import Report
from files import write_atomically
from runtime.process import Stopped, stop_requests
from runtime.run_dir import read_rows

PART_SECONDS = 480
POLL_SECONDS = 0.3  # between looks at whether a signal has arrived
STOP_SECONDS = 20  # for a command that is out of time to stop what it has started
ROOT = Path(__file__).parents[1]
LOSS_TO_REACH = 1.4697  # nats per character: nanoGPT's validation loss with this model, from its README
PARTS = ("default", "norms", "train", "loss", "generate", "claims", "seeds", "tests")


@dataclass(frozen=True)
class Sizes:
    """Everything that a rehearsal makes smaller."""

    default: str
    norms: tuple[tuple[int, int], ...]  # rows, features
    train: dict[str, str]  # a shape by its name
    generate: str
    loss: str
    seeds: str
    claims: str
    tests: str


FULL = Sizes(
    default="",
    norms=((8192, 1024), (65536, 1024), (16384, 2048), (8192, 4096), (65536, 4096), (16384, 8192)),
    train={
        "124m": "--dim 768 --layers 12 --heads 12 --hidden-dim 2048 --context 1024 --batch-size 12",
        "124m-2048": "--dim 768 --layers 12 --heads 12 --hidden-dim 2048 --context 2048 --batch-size 6",
        "1b": "--dim 2048 --layers 16 --heads 32 --hidden-dim 8192 --context 2048 --batch-size 4",
    },
    generate="--dim 2048 --layers 16 --heads 32 --hidden-dim 8192 --context 2048 --samples 64",
    loss="--layers 6 --heads 6 --dim 384 --context 256 --batch-size 64 --steps 600 --eval-every 50 --save-every 600",
    seeds="--layers 6 --heads 6 --dim 384 --context 256 --batch-size 64 --steps 200",
    claims="--preset small --steps 300 --batch-size 32 --seeds 2",
    tests="",
)
TINY = "--dim 32 --layers 1 --heads 2 --context 32 --batch-size 4"
TINY_RUN = f"{TINY} --steps 2 --eval-every 1 --save-every 2 --eval-tokens 64"
TOY = Sizes(
    default=f"{TINY_RUN} --vocab-size 400",
    norms=((16, 32),),
    train={"124m": f"{TINY} --hidden-dim 64 --vocab-size 99 --rounds 1"},
    generate="--dim 32 --layers 1 --heads 2 --context 32 --samples 3 --tokens 4 --vocab-size 99 --rounds 1",
    loss=TINY_RUN,
    seeds=TINY_RUN,
    claims=f"{TINY_RUN} --vocab-size 400 --seeds 2",
    tests="--collect-only",
)


@dataclass(frozen=True)
class GPUConfig:
    """Options of `gpu`."""

    part: str = option(None, "run only this part (default: all)", choices=list(PARTS))
    folder: str = option("runs/gpu", "folder for the results; gets a number if it is in use", metavar="DIR")
    text: str = option(
        "shakespeare", "tiny Shakespeare; without a network, the path of the downloaded file", metavar="PATH"
    )
    toy: bool = option(False, "rehearse all commands at toy sizes")
    device: str = option("cuda", "device to measure; cpu only to rehearse", choices=["cuda", "cpu"])
    out: str = option("", "JSON file for the report (default: bench-gpu.json under runs/)", metavar="FILE")

    def __post_init__(self) -> None:
        if self.device == "cpu" and not self.toy:
            raise ValueError("--device cpu takes hours at these sizes; add --toy, or use --device cuda")
        if self.text != "shakespeare" and not Path(self.text).is_file():
            raise ValueError(f"--text {self.text}: no such file")


def bench_gpu(config: GPUConfig, device: torch.device) -> Report:
    """Run the GPU benchmark suite, in parts of at most eight minutes each."""
    parts = commands(config)
    folder = unused_folder(Path(config.folder))
    rows = run_parts({name: parts[name] for name in ([config.part] if config.part else PARTS)}, folder)
    return {"folder": str(folder), "rows": rows}


def commands(config: GPUConfig) -> dict[str, list[str]]:
    """The arguments of python for each part. {out} is the folder of the results."""
    sizes = TOY if config.toy else FULL
    device = f"--device {config.device}"
    text = config.text if config.text == "shakespeare" else str(Path(config.text).resolve())
    data = f"--data {shlex.quote(text)} --tokenizer bytes".replace("{", "{{").replace("}", "}}")
    return {
        "default": [f"train.py --out {{out}}/default {sizes.default}"],
        "norms": [
            f"bench.py norms --rows {rows} --dim {dim} --compile {device} --out {{out}}/norms-{rows}-{dim}.json"
            for rows, dim in sizes.norms
        ],
        "train": [
            f"bench.py train {shape} --dtype bfloat16 --{mode} {device} --out {{out}}/train-{name}-{mode}.json"
            for name, shape in sizes.train.items()
            for mode in ("compile", "no-compile")
        ],
        "loss": [f"train.py {data} {sizes.loss} {device} --out {{out}}/loss"],
        "generate": [f"bench.py generate {sizes.generate} --dtype bfloat16 {device} --out {{out}}/generate.json"],
        "claims": [
            f"ablate.py --norms rmsnorm layernorm dyt --placements pre post {sizes.claims} {device} "
            "--out {out}/claims"
        ],
        "seeds": [
            f"ablate.py {data} {sizes.seeds} --seeds {seeds} --jobs {seeds} {device} --out {{out}}/seeds-{seeds}"
            for seeds in (1, 5)
        ],
        "tests": [f"-m pytest -q -m gpu {sizes.tests}"],
    }


def unused_folder(folder: Path) -> Path:
    """`folder` if it is new or empty, else the first such of FOLDER-2, FOLDER-3, ... Nothing is ever overwritten."""
    for number in count(1):
        candidate = folder.with_name(f"{folder.name}-{number}") if number > 1 else folder
        if not candidate.exists() or (candidate.is_dir() and not any(candidate.iterdir())):
            candidate.mkdir(parents=True, exist_ok=True)
            return candidate
    raise AssertionError("count() is infinite")


def run_parts(parts: dict[str, list[str]], out: Path) -> list[dict[str, Any]]:
    """Run the commands of each part. Returns a row per command. One that fails does not stop the others.

    SIGINT, SIGTERM and SIGHUP do: they raise Stopped once everything that a command has started has ended.
    `out` receives the rows (gpu.json, updated after each command) and the output of each part (PART.txt).
    """
    rows: list[dict[str, Any]] = []
    out = out.resolve()  # the commands run in the project's folder
    out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        deadline = time.monotonic() + PART_SECONDS
        for command in part:
            arguments, started = shlex.split(command.format(out=shlex.quote(str(out)))), time.monotonic()
            with (out / f"{name}.txt").open("a") as file, stop_requests() as requests:
                file.write(f"$ python {command}\n")
                file.flush()
                ended = run([sys.executable, *arguments], file, max(1, deadline - started), requests)
            seconds = round(time.monotonic() - started, 1)
            result = reached(read_rows(out / "loss" / "metrics.jsonl")) if name == "loss" else ""
            rows.append({"part": name, "seconds": seconds, "ended": ended, "result": result, "command": command})
            print(f"{name}: {ended} after {seconds} s", file=sys.stderr)
            write_atomically(out / "gpu.json", json.dumps(rows, indent=2) + "\n")
    return rows


def run(command: list[str], output: Any, seconds: float, requests: list[int]) -> str:
    """Run a command in the project's folder. When its time is over, stop it and every process it has started.

    Raises Stopped, after the same, as soon as there is a signal in `requests`.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    deadline = time.monotonic() + seconds
    try:
        while not requests and time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                return f"exit {process.wait(POLL_SECONDS)}"
        if requests:
            raise Stopped(requests[0], "--part, once for each part that is missing")
        return "out of time"
    finally:
        if process.poll() is None:
            stop(process)


def stop(process: subprocess.Popen) -> None:
    """Ask the process and its group to stop, so that ablate.py ends its runs, then kill those that are left."""
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        try:
            if hasattr(os, "killpg"):
                os.killpg(process.pid, number)
            else:
                process.kill()  # Windows has no process groups
            process.wait(STOP_SECONDS)
        except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):  # macOS refuses a group of zombies
            pass


def reached(metrics: list[dict[str, Any]]) -> str:
    """When a run's validation loss was first at most `LOSS_TO_REACH`, in seconds of the last log of training."""
    seconds, best = 0.0, float("inf")
    for row in metrics:
        seconds = row.get("seconds", seconds)
        best = min(best, row.get("val_loss", best))
        if best <= LOSS_TO_REACH:
            return f"val_loss {best:.4f} after {seconds:.1f} s"
    return f"val_loss {best:.4f}, above {LOSS_TO_REACH}" if best < float("inf") else ""


def exit_code(rows: list[dict[str, Any]]) -> int:
    """0 if every command succeeded, else 1."""
    return int(any(row["ended"] != "exit 0" for row in rows))
