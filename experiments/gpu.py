"""What to measure when there is a GPU, most telling first: `python bench.py gpu`.

A part is a few commands of this project, and takes at most `MOST_SECONDS`, so that a card on loan is well spent.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MOST_SECONDS = 480
ROOT = Path(__file__).parent
SHAPES = {
    "124m": "--dim 768 --layers 12 --heads 12 --hidden-dim 2048 --context 1024 --batch-size 12",
    "1b": "--dim 2048 --layers 16 --heads 32 --hidden-dim 8192 --context 2048 --batch-size 4",
}
SHAKESPEARE = "--data shakespeare --tokenizer bytes --layers 6 --heads 6 --dim 384 --context 256"

# {out} is the folder of the results; what is run is python with these arguments.
PARTS = {
    "norms": [
        f"bench.py norms --rows {rows} --dim {dim} --out {{out}}/norms-{rows}-{dim}.json"
        for rows, dim in ((8192, 1024), (65536, 1024), (8192, 4096), (65536, 4096), (16384, 8192))
    ],
    "train": [f"bench.py train {shape} --compile --out {{out}}/train-{name}.json" for name, shape in SHAPES.items()],
    "loss": [f"train.py {SHAKESPEARE} --steps 600 --batch-size 64 --eval-every 50 --save-every 600 --out {{out}}/loss"],
    "generate": [f"bench.py generate {SHAPES['1b'].replace('--batch-size 4', '')} --out {{out}}/generate.json"],
    "seeds": [
        f"ablate.py {SHAKESPEARE} --steps 200 --seeds {seeds} --jobs {seeds} --out {{out}}/seeds-{seeds}"
        for seeds in (1, 5)
    ],
    "default": ["train.py --out {out}/default"],
    "tests": ["-m pytest -q -m gpu"],
}


def run_parts(names: list[str], out: Path) -> list[dict[str, Any]]:
    """Run the parts; a row for each command, written to `out`/gpu.json as it ends, with its last lines."""
    rows: list[dict[str, Any]] = []
    out = out.resolve()  # for commands that run in this project's folder
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        until = time.monotonic() + MOST_SECONDS
        for command in PARTS[name]:
            arguments, started = shlex.split(command.format(out=shlex.quote(str(out)))), time.monotonic()
            try:
                ended = subprocess.run(
                    [sys.executable, *arguments],
                    cwd=ROOT,
                    timeout=max(1, until - started),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                how, said = f"exit {ended.returncode}", ended.stdout
            except subprocess.TimeoutExpired as error:
                how, said = "no time left", (error.stdout or b"").decode()
            seconds = round(time.monotonic() - started, 1)
            rows.append({"part": name, "seconds": seconds, "ended": how, "command": command})
            (out / f"{name}.txt").open("a").write(f"$ python {command}\n{said}\n")
            (out / "gpu.json").write_text(json.dumps(rows, indent=2) + "\n")
    return rows


def exit_code(rows: list[dict[str, Any]]) -> int:
    """0 if every command did what it was to do, 1 if one did not."""
    return int(any(row["ended"] != "exit 0" for row in rows))
