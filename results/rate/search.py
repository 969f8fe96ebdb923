"""The runs of this page: python results/rate/search.py WORK fit|long|held adds rows to runs.csv. It goes on if stopped.

WORK gets the folders of the runs. Two run at a time, with one thread each.
"""

import csv
import itertools
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from experiments.rates import next_runs  # noqa: E402
from runtime.run_dir import read_rows  # noqa: E402

HERE = Path(__file__).parent
COMMON = "--device cpu --dtype float32 --no-compile --eval-every 1000000 --save-every 1000000 --heads 2"
SHAKESPEARE = os.environ.get("SHAKESPEARE", "shakespeare")  # a file, on a machine that cannot download it
MOST_RATES, MOST_SEEDS, HOURS = 8, 3, 10
NOTED_HOURS = 4.1  # of the runs of noted.csv
# Name: flags, and the first k of the five rates 0.015 * 1.6**k that it begins with.
FIT = {
    "width-64": ("--dim 64", -1),
    "width-256": ("--dim 256", -3),
    "width-128": ("--dim 128", -3),
    "width-96": ("--dim 96", -2),
    "width-192": ("--dim 192", -3),
    "steps-2000": ("--dim 64 --steps 2000", -2),
    "steps-250": ("--dim 64 --steps 250", -1),
    "steps-1000": ("--dim 64 --steps 1000", -2),
    "batch-32": ("--dim 64 --batch-size 32", -2),
    "batch-4": ("--dim 64 --batch-size 4", -1),
    "batch-16": ("--dim 64 --batch-size 16", -2),
    "layers-2": ("--dim 64 --layers 2", -1),
    "layers-8": ("--dim 64 --layers 8", -2),
    "steps-4000": ("--dim 64 --steps 4000", -3),
    "adamw-64": ("--dim 64 --optimizer adamw", -2),
    "adamw-256": ("--dim 256 --optimizer adamw", -4),
}
LONG = "--dim 128 --steps 2000"
HELD = {  # The cheapest first.
    "held-192-batch-16": ("--dim 192 --batch-size 16", -3),
    "held-shakespeare": ("--dim 96 --steps 1000 --data shakespeare", -2),
    "held-256-2000": ("--dim 256 --heads 4 --steps 2000", -4),
}


def rate(k: int) -> float:
    return float(f"{0.015 * 1.6**k:.3g}")


def read() -> list[dict[str, str]]:
    """Rows of runs.csv, and of noted.csv where a run was not made again."""
    rows: dict[tuple[str, float, str], dict[str, str]] = {}
    for file in (HERE / "noted.csv", HERE / "runs.csv"):
        found = csv.DictReader(file.open()) if file.exists() else ()
        rows |= {(row["point"], float(row["lr"]), row["seed"]): row for row in found}
    return list(rows.values())


def losses_at(point: str) -> dict[float, list[float]]:
    """val_bpb of each seed, by rate, in the order of seeds. Infinite if the run diverged."""
    found: dict[float, list[float]] = {}
    for row in sorted((row for row in read() if row["point"] == point), key=lambda row: int(row["seed"])):
        found.setdefault(float(row["lr"]), []).append(float(row["val_bpb"]))
    return dict(sorted(found.items()))


def wanted(points: dict[str, tuple[str, int]]) -> list[tuple[str, str, float, int]]:
    """The runs that the points want now, whether they have ended or not: (point, flags, rate, seed)."""
    cells = []
    for point, (flags, first) in points.items():
        rates, seeds = [rate(k) for k in range(first, first + 5)], 1
        losses = losses_at(point)
        if set(rates) <= losses.keys() and (more := next_runs(losses, 3)):
            rates, seeds = more
            if len({*rates, *losses}) > MOST_RATES or seeds > MOST_SEEDS:
                continue
        elif set(rates) <= losses.keys():
            continue
        cells += [(point, flags, lr, 1000 + seed) for lr, seed in itertools.product(rates, range(seeds))]
    return cells


def long_cells() -> list[tuple[str, str, float, int]]:
    """Seed by seed; the last ones with the momentum for longer runs."""
    cells = [("long", LONG, rate(k), seed) for seed in (1000, 1001) for k in (0, 1, -1, -2)]
    return cells + [("long-momentum", f"{LONG} --momentum 0.95", rate(k), 1000) for k in (-1, 0, 1)]


def run(work: Path, point: str, flags: str, lr: float, seed: int) -> dict[str, object]:
    """Train one run, or continue it. Its row, with the processor seconds of this start."""
    folder = work / f"{point}-lr{lr:g}-seed{seed}"
    again = (folder / "run.json").exists()
    given = "--resume" if again else f"{COMMON} {flags} --lr {lr} --seed {seed} --cache-dir {work / 'cache'}"
    words = [SHAKESPEARE if word == "shakespeare" else word for word in given.split()]
    command = [sys.executable, str(ROOT / "train.py"), *words, "--out", str(folder)]
    with (work / f"{folder.name}.log").open("ab") as log:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        process = subprocess.Popen(command, env=os.environ | threads, stdout=log, stderr=log, cwd=work)
        _, status, usage = os.wait4(process.pid, 0)
    last = read_rows(folder / "metrics.jsonl")[-1]
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 5), f"{folder.name}: exit code {code}"
    bpb = math.inf if code == 5 else last["val_bpb"]
    cpu = round(usage.ru_utime + usage.ru_stime, 1)
    return {"point": point, "flags": flags, "lr": lr, "seed": seed, "val_bpb": bpb, "cpu_seconds": cpu}


def main() -> None:
    work, part = Path(sys.argv[1]).resolve(), sys.argv[2]
    work.mkdir(parents=True, exist_ok=True)
    lock, busy = threading.Lock(), set[tuple]()

    def following() -> tuple | None:
        """The next run that has not begun, marked as begun."""
        cells = long_cells() if part == "long" else wanted(FIT if part == "fit" else HELD)
        done = {(row["point"], float(row["lr"]), int(row["seed"])) for row in read()}
        spent = NOTED_HOURS * 3600 + sum(float(row.get("cpu_seconds", 0)) for row in read())
        for cell in cells:
            key = cell[0], cell[2], cell[3]
            if key not in done | busy and spent < HOURS * 3600:
                busy.add(key)
                return cell
        return None

    def worker() -> None:
        while True:
            with lock:
                cell = following()
            if cell is None and not busy:
                return
            if cell is None:  # what the other one runs may lead to more
                threading.Event().wait(5)
                continue
            row = run(work, *cell)
            with lock:
                file = HERE / "runs.csv"
                new = not file.exists()
                with file.open("a", newline="") as opened:
                    writer = csv.DictWriter(opened, row.keys(), lineterminator="\n")
                    if new:
                        writer.writeheader()
                    writer.writerow(row)
                busy.discard((cell[0], cell[2], cell[3]))
                print(*row.values(), flush=True)

    workers = [threading.Thread(target=worker) for _ in range(2)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()


if __name__ == "__main__":
    main()
