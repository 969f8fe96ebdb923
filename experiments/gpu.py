"""The GPU benchmark suite, most important part first: `python bench.py gpu`.

A part runs a few commands of this project. Each part is limited to `PART_SECONDS`, to fit into a short GPU session.
"""

import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config import option
from experiments.benchmarks import Report

PART_SECONDS = 480
ROOT = Path(__file__).parents[1]
SHAPES = {
    "124m": "--dim 768 --layers 12 --heads 12 --hidden-dim 2048 --context 1024",
    "1b": "--dim 2048 --layers 16 --heads 32 --hidden-dim 8192 --context 2048",
}
BATCH_SIZES = {"124m": 12, "1b": 4}
SHAKESPEARE = "--data shakespeare --tokenizer bytes --layers 6 --heads 6 --dim 384 --context 256"

# The arguments of python; {out} is the folder of the results.
PARTS = {
    "norms": [
        f"bench.py norms --rows {rows} --dim {dim} --out {{out}}/norms-{rows}-{dim}.json"
        for rows, dim in ((8192, 1024), (65536, 1024), (8192, 4096), (65536, 4096), (16384, 8192))
    ],
    "train": [
        f"bench.py train {shape} --batch-size {BATCH_SIZES[name]} --compile --out {{out}}/train-{name}.json"
        for name, shape in SHAPES.items()
    ],
    "loss": [f"train.py {SHAKESPEARE} --steps 600 --batch-size 64 --eval-every 50 --save-every 600 --out {{out}}/loss"],
    "generate": [f"bench.py generate {SHAPES['1b']} --out {{out}}/generate.json"],
    "seeds": [
        f"ablate.py {SHAKESPEARE} --steps 200 --seeds {seeds} --jobs {seeds} --out {{out}}/seeds-{seeds}"
        for seeds in (1, 5)
    ],
    "default": ["train.py --out {out}/default"],
    "tests": ["-m pytest -q -m gpu"],
}


@dataclass(frozen=True)
class GPUConfig:
    """Options of `gpu`."""

    part: str = option(None, "run only this part (default: all)", choices=list(PARTS))
    folder: str = option("runs/gpu", "folder for the results", metavar="DIR")
    device: str = option("cuda", "device to measure", choices=["cuda"])
    out: str = option("", "JSON file for the report (default: bench-gpu.json under runs/)", metavar="FILE")


def bench_gpu(config: GPUConfig, device: torch.device) -> Report:
    """Run the GPU benchmark suite, in parts of at most eight minutes each."""
    names = [config.part] if config.part else list(PARTS)
    return {"folder": config.folder, "rows": run_parts(names, Path(config.folder))}


def run_parts(names: list[str], out: Path) -> list[dict[str, Any]]:
    """Run the parts. Returns a row per command.

    `out` receives the rows (gpu.json, updated after each command) and the output of each part (PART.txt).
    """
    rows: list[dict[str, Any]] = []
    out = out.resolve()  # the commands run in the project's folder
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        deadline = time.monotonic() + PART_SECONDS
        for command in PARTS[name]:
            arguments, started = shlex.split(command.format(out=shlex.quote(str(out)))), time.monotonic()
            try:
                process = subprocess.run(
                    [sys.executable, *arguments],
                    cwd=ROOT,
                    timeout=max(1, deadline - started),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                ended, output = f"exit {process.returncode}", process.stdout
            except subprocess.TimeoutExpired as error:
                ended, output = "out of time", (error.stdout or b"").decode()
            seconds = round(time.monotonic() - started, 1)
            rows.append({"part": name, "seconds": seconds, "ended": ended, "command": command})
            with (out / f"{name}.txt").open("a") as file:
                file.write(f"$ python {command}\n{output}\n")
            (out / "gpu.json").write_text(json.dumps(rows, indent=2) + "\n")
    return rows


def exit_code(rows: list[dict[str, Any]]) -> int:
    """0 if every command succeeded, else 1."""
    return int(any(row["ended"] != "exit 0" for row in rows))
