"""The GPU benchmark suite, most important part first: `python bench.py gpu`.

A part runs a few commands of this project, also after one that failed. Each part is limited to `PART_SECONDS`, to fit
into a short GPU session: then its command is killed.
"""

import shlex
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config import option
from experiments.benchmarks import Report
from files import ROOT, require

PART_SECONDS = 480
# nanoGPT's model for tiny Shakespeare. Its README reports a validation loss of 1.4697 nats per character.
NANOGPT = "--layers 6 --heads 6 --dim 384 --context 256 --batch-size 64"
PARTS = {  # each line is a command
    "default": "train.py --out {out}/default",
    "norms": """
        bench.py norms --rows 65536 --dim 1024 --compile --json {out}/norms-65536-1024.json
        bench.py norms --rows 8192 --dim 4096 --compile --json {out}/norms-8192-4096.json
        bench.py norms --rows 16384 --dim 8192 --compile --json {out}/norms-16384-8192.json""",
    "train": """
        bench.py train --preset 124m --vocab-size 50304 --compile --json {out}/train-124m.json
        bench.py train --preset 1b --compile --json {out}/train-1b.json
        bench.py train --preset 124m --context 2048 --micro-batch-size 6 --compile --json {out}/train-124m-2048.json
        bench.py train --preset 1b --no-compile --json {out}/train-1b-eager.json""",
    "loss": f"train.py {{data}} {NANOGPT} --steps 800 --eval-every 50 --save-every 800 --out {{out}}/loss",
    "generate": "bench.py generate --preset 1b --samples 64 --rounds 3 --compile --json {out}/generate.json",
    "claims": """
        ablate.py --norms rmsnorm layernorm dyt --placements pre post --preset small --steps 200 \
            --seeds 2 --out {out}/claims""",
    "seeds": f"""
        ablate.py {{data}} {NANOGPT} --steps 200 --seeds 1 --out {{out}}/seeds-1
        ablate.py {{data}} {NANOGPT} --steps 200 --seeds 5 --jobs 5 --out {{out}}/seeds-5""",
    "tests": "-m pytest -q -m gpu",
}


@dataclass(frozen=True)
class GPUConfig:
    part: str = option(None, "run only this part (default: all)", choices=list(PARTS))
    folder: str = option("runs/gpu", "new folder for the results", metavar="DIR")
    text: str = option("shakespeare", "shakespeare, or without a network a file with tiny Shakespeare", metavar="PATH")
    device = "cuda"  # not an option

    def __post_init__(self) -> None:
        require(not Path(self.folder).exists(), f"--folder {self.folder} exists; name a new one")


def commands(config: GPUConfig) -> dict[str, list[list[str]]]:
    """The arguments of python for each command of each part."""
    out, text = (shlex.quote(str(Path(name).resolve())) for name in (config.folder, config.text))
    text = "shakespeare" if config.text == "shakespeare" else text
    parts = {}
    for name in [config.part] if config.part else PARTS:
        lines = PARTS[name].format(out=out, data=f"--data {text} --tokenizer bytes").strip().splitlines()
        device = "" if name == "tests" else f"--device {config.device}"
        parts[name] = [shlex.split(f"{line} {device}") for line in lines]
    return parts


def bench_gpu(config: GPUConfig, device: torch.device) -> Report:
    """Run the GPU benchmark suite, in parts of at most eight minutes each."""
    rows, out = [], Path(config.folder).resolve()
    out.mkdir(parents=True)
    for name, part in commands(config).items():
        deadline = time.monotonic() + PART_SECONDS
        for command in part:
            started, ended = time.monotonic(), "out of time"
            with (out / f"{name}.txt").open("a") as file, suppress(subprocess.TimeoutExpired):
                print("$ python", shlex.join(command), file=file, flush=True)
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                rest = max(1, deadline - started)
                process = subprocess.run([sys.executable, *command], cwd=ROOT, timeout=rest, **streams)
                ended = f"exit {process.returncode}"
            seconds = round(time.monotonic() - started, 1)
            rows.append({"part": name, "seconds": seconds, "ended": ended, "command": shlex.join(command)})
            print(f"{name}: {ended} after {seconds} s", file=sys.stderr)
    return {"folder": config.folder, "rows": rows}
