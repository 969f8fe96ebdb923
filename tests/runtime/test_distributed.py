"""train.py on several ranks. Run by torchrun, this file trains several runs in turn, since starting ranks takes longer
than training.
"""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import train
from runtime import distributed
from runtime.checkpoint import find_checkpoint
from runtime.run_dir import locked

ROOT = Path(__file__).parents[2]
SIZES = "--dim 32 --layers 2 --heads 2 --context 32 --batch-size 8 --tokenizer bytes --device cpu --dtype float32"
COMMON = f"{SIZES} --eval-tokens 2000 --eval-every 5 --save-every 100"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes it finds in /proc")


# --- in the ranks ----------------------------------------------------------------------------------------------------


def train_and_record(flags: list[str]) -> dict[str, Any]:
    """Run train.py in this process: its exit code, what it prints on standard error, and the rows of each step."""
    rows: dict[int, list[str]] = {}
    batch, errors, code = train.training_batch, StringIO(), 0

    def record_rows(tokens, seed, step, *rest):
        inputs, targets = batch(tokens, seed, step, *rest)
        both = zip(inputs, targets, strict=True)
        if (
            "--out" in flags
            and flags[flags.index("--out") + 1].endswith("stopped")
            and step == 4
            and distributed.rank()
        ):
            os.kill(os.getpid(), signal.SIGTERM)
        rows[step] = [hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest() for x, y in both]
        return inputs, targets

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(errors):
        patch.setattr(train, "training_batch", record_rows)
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        patch.setattr(train, "EVAL_BATCH_TOKENS", 800)  # so that the last batch has no partner on the other rank
        patch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **options: None)  # takes longer than training
        try:
            train.main(flags)
        except SystemExit as exited:
            code = int(exited.code or 0)
    return {"code": code, "errors": errors.getvalue(), "rows": rows}


def train_all(commands: Path, records: Path) -> None:
    with distributed.process_group():
        results = [train_and_record(flags.split()) for flags in commands.read_text().splitlines()]
        (records / f"rank{distributed.rank()}.json").write_text(json.dumps(results))


# --- around the ranks ------------------------------------------------------------------------------------------------


def torchrun(ranks: int, *arguments: object, options: str = "") -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, *options.split(), *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_on(ranks: int, commands: list[str], folder: Path) -> list[list[dict[str, Any]]]:
    """Train each of `commands` on so many ranks. Returns what each rank recorded of each command."""
    folder.mkdir()
    (folder / "commands").write_text("\n".join(commands))
    done = subprocess.run(
        torchrun(ranks, __file__, folder / "commands", folder),
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    by_rank = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return [list(records) for records in zip(*by_rank, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def common(folder: Path) -> str:
    """Flags of all runs, with a text of sentences of six words."""
    draw = random.Random(0)
    words = ["the", "cat", "dog", "sees", "hears", "a", "bird", "and", "sings", "sleeps"]
    text = folder / "text.txt"
    text.write_text("".join(" ".join(draw.choices(words, k=6)) + ".\n" for _ in range(1500)))
    return f"{COMMON} --data {text} --cache-dir {folder / 'cache'}"


def series(run: Path, *names: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows for name in names if name in row]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(find_checkpoint(str(run)) / "model.safetensors")


CASES = {  # name: flags; every one with DDP and FSDP2
    "muon": "--steps 8",
    "accumulated": "--steps 8 --optimizer adamw --micro-batch-size 2 --no-tie-embeddings --norm dyt --recompute "
    "--kv-heads 1 --clip 0.5",
    "ngpt": "--steps 8 --optimizer adamw --placement ngpt",
}
COMPILED = "--steps 5 --layers 1"
LONG = "--steps 40 --save-every 5 --eval-every 20 --dropout 0.1"
BAD = {
    "--batch-size 7": "error: --batch-size 7 is not divisible by the number of ranks, 2",
    "--micro-batch-size 3 --batch-size 6 --steps 2": "",  # a rank's share, in one micro-batch
    "--micro-batch-size 4 --batch-size 12": "error: --micro-batch-size 4 does not divide the 6 sequences of each of 2",
    "--norm powernorm": "error: --norm powernorm trains on one rank",
    "--nonsense": "unrecognized arguments: --nonsense",
    "--shard --fast": "error: the kernels of --fast cannot be used: they need --no-shard",
    "--data missing.txt": "missing.txt",
}


@pytest.fixture(scope="module")
def trained(folder: Path, common: str) -> dict[str, list[dict[str, Any]]]:
    """Each case on one rank, here, and on two, with DDP and FSDP2: what each rank recorded."""
    one = CASES | {"compiled": COMPILED}
    commands = {f"one {name}": f"{common} {flags} --out {folder}/one-{name}" for name, flags in one.items()}
    records = {name: [train_and_record(command.split())] for name, command in commands.items()}
    commands = {
        f"{engine} {name}": f"{common} {flags} --out {folder}/{engine}-{name} {'--shard' * (engine == 'fsdp')}"
        for name, flags in CASES.items()
        for engine in ("ddp", "fsdp")
    }
    commands |= {f"bad {flags}": f"{common} --steps 2 {flags} --out {folder}/bad-{len(flags)}" for flags in BAD}
    commands["undisturbed"] = f"{common} {LONG} --out {folder}/undisturbed"
    commands["compiled"] = f"{common} {COMPILED} --compile --out {folder}/compiled"
    commands["diverges"] = f"{common} --norm none --lr 1e9 --clip 0 --warmup 0 --steps 20 --out {folder}/diverges"
    commands["stopped"] = f"{common} --steps 20 --out {folder}/stopped"
    commands["in use"] = f"{common} --steps 2 --out {folder}/used"
    (folder / "used").mkdir()
    with locked(folder / "used"):
        return records | dict(zip(commands, run_on(2, list(commands.values()), folder / "two"), strict=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(engine, name, trained, folder):
    """The order of sums differs, so the last digits may. Two micro-batches on one rank differ as much."""
    one, two = folder / f"one-{name}", folder / f"{engine}-{name}"
    assert [record["code"] for record in trained[f"{engine} {name}"]] == [0, 0]
    for figure in ("train_loss", "val_loss", "val_bpb", "grad_norm"):
        assert series(two, figure) == pytest.approx(series(one, figure), rel=1e-5), figure
    assert (two / "samples.txt").read_text() == (one / "samples.txt").read_text()
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    found, expected = weights(two), weights(one)
    assert found.keys() == expected.keys()
    for key in expected:  # after 8 steps with learning rates of 0.015
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=2e-4)


def test_compiled_ranks_train_and_evaluate_as_one(trained, folder):
    assert [record["code"] for record in trained["compiled"]] == [0, 0]
    for figure in ("train_loss", "val_loss", "grad_norm"):
        expected = series(folder / "one-compiled", figure)
        assert series(folder / "compiled", figure) == pytest.approx(expected, rel=1e-5), figure


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_ranks_share_the_rows_of_each_step(engine, name, trained):
    (one,), ranks = trained[f"one {name}"], trained[f"{engine} {name}"]
    assert len(one["rows"]) == 8
    for step, expected in one["rows"].items():
        assert [row for rank in ranks for row in rank["rows"][str(step)]] == expected
        assert len(ranks[0]["rows"][str(step)]) == 4


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_said_once_and_every_rank_exits_with_2(flags, trained, folder):
    ranks, message = trained[f"bad {flags}"], BAD[flags]
    assert [rank["code"] for rank in ranks] == ([2, 2] if message else [0, 0])
    assert message in ranks[0]["errors"]
    assert ranks[1]["errors"] == ""
    if message:
        assert not (folder / f"bad-{len(flags)}").exists()


def test_divergence_ends_every_rank(trained, folder):
    assert [rank["code"] for rank in trained["diverges"]] == [5, 5]
    assert "not finite" in trained["diverges"][0]["errors"] and trained["diverges"][1]["errors"] == ""
    assert all(weight.isfinite().all() for weight in weights(folder / "diverges").values())


def test_a_run_in_use_is_refused_by_every_rank(trained):
    assert [rank["code"] for rank in trained["in use"]] == [4, 4]
    assert "in use" in trained["in use"][0]["errors"] and trained["in use"][1]["errors"] == ""


def test_ranks_do_not_share_a_gpu(monkeypatch):
    distributed.check_device(torch.device("cuda:1"))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    distributed.check_device(torch.device("cpu"))
    with pytest.raises(ValueError, match="--device cuda:1 is one device for all ranks; use --device cuda"):
        distributed.check_device(torch.device("cuda:1"))


def test_an_error_that_ranks_share_keeps_its_errno(monkeypatch):
    """By which a full disk is told from bad input. Nothing is sent."""

    def gather(errors, mine):
        errors[1] = mine

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed.dist, "all_gather_object", gather)
    with pytest.raises(OSError, match="No space left") as raised, distributed.raise_on_all_ranks():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize("batches", range(8))
def test_each_batch_of_an_evaluation_counts_once(batches, monkeypatch):
    """And every rank gets equally many: a forward pass of a sharded model needs them all."""
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    shares = []
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(list(distributed.shares(iter(range(batches)))))
    assert len({len(share) for share in shares}) == 1
    assert sorted(batch for share in shares for batch, counts in share if counts) == list(range(batches))


def test_each_rank_draws_its_own_dropout(monkeypatch):
    """A function of seed, step and rank; rank 0 has what one process has. The next run's seed is not a rank's."""
    seeds = []
    for rank in range(4):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        seeds += [distributed.seed(seed + 1_000_003 * step) for step in range(4) for seed in range(4)]
    assert len(set(seeds)) == 64 and seeds[:5] == [0, 1, 2, 3, 1_000_003]
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_checkpoint_of_two_ranks_resumes_on_one(engine, trained, folder, common):
    """On one rank, the run of two goes on as the run of one does."""
    losses = []
    for run in (folder / "one-muon", folder / f"{engine}-muon"):
        train.main(f"--resume --steps 14 --schedule constant --out {run}".split())
        losses.append(series(run, "train_loss", "val_loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert json.loads((folder / f"{engine}-muon/run.json").read_text())["training"]["shard"] is False


# --- ranks that fail, and signals ------------------------------------------------------------------------------------


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Process ids of the ranks that a torchrun has started."""
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


def processes_of(out: Path) -> list[str]:
    """Every process that has the run directory in its command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            found += [path.parent.name] if str(out).encode() in path.read_bytes() else []
    return found


@contextmanager
def started(out: Path, flags: str, options: str = "", ranks: int = 2) -> Iterator[subprocess.Popen]:
    """train.py under torchrun. Whatever is left of it is killed at the end."""
    command = torchrun(ranks, ROOT / "train.py", *flags.split(), "--out", out, options=options)
    pipe = subprocess.PIPE
    launcher = subprocess.Popen(command, env=environment(), cwd=out.parent, stdout=pipe, stderr=pipe, text=True)
    try:
        yield launcher
    finally:
        for pid in processes_of(out):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        launcher.communicate()


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def same_bits(run: Path, expected: Path) -> bool:
    names = ("model.safetensors", "optimizer.safetensors")
    folders = find_checkpoint(str(run)), find_checkpoint(str(expected))
    return all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names)


def test_a_killed_rank_is_restarted_and_the_run_continues(trained, folder, common):
    out = folder / "killed"
    with started(out, f"{common} {LONG}", "--max-restarts 1") as launcher:
        wait_until(lambda: any(out.glob("checkpoints/step-*")))
        os.kill(ranks_of(launcher)[1], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=60)
        assert launcher.returncode == 0, errors
        assert processes_of(out) == []
    assert same_bits(out, folder / "undisturbed")
    steps = series(out, "step")
    assert steps == sorted(steps) and steps[-1] == series(folder / "undisturbed", "step")[-1]
    assert json.loads((out / "run.json").read_text())["resumed"]


def test_a_stop_request_to_one_rank_stops_all_after_the_same_step(trained, folder):
    """All exit with 143, the checkpoint is complete, and rank 0 says how to continue."""
    assert [rank["code"] for rank in trained["stopped"]] == [143, 143]
    assert "stopped by SIGTERM; continue with --resume" in trained["stopped"][0]["errors"]
    assert trained["stopped"][1]["errors"] == ""
    assert find_checkpoint(folder / "stopped").name == "step-000005"


def test_restarts_need_out(monkeypatch, common):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    errors = StringIO()
    with redirect_stderr(errors), pytest.raises(SystemExit) as exited:
        train.main(common.split())
    assert exited.value.code == 2 and "--max-restarts needs --out" in errors.getvalue()


@pytest.mark.parametrize("left", ["a folder", "a checkpoint"])
def test_a_restart_continues_from_whatever_is_left(left, monkeypatch, folder, common):
    """Also with --preset, which --resume alone refuses."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this launch")
    out = folder / f"restarted-after-{left.replace(' ', '-')}"
    flags = f"--preset tiny {common} --steps 6 --save-every 2 --out {out}"
    if left == "a folder":
        out.mkdir()
        (out / ".lock").touch()
    elif left == "a checkpoint":
        train.main(flags.split())
        shutil.rmtree(find_checkpoint(str(out)))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train.main(flags.split())
    assert find_checkpoint(str(out)).name == "step-000006"
    assert ("resumed" in json.loads((out / "run.json").read_text())) == (left == "a checkpoint")


def test_a_restart_does_not_continue_the_run_of_another_launch(monkeypatch, folder, common, capsys):
    out = folder / "of-another-launch"
    flags = f"{common} --steps 2 --save-every 2 --out {out}"
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "an earlier launch")
    train.main(flags.split())
    before = (out / "run.json").read_text()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this launch")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(SystemExit) as refused:
        train.main(flags.split())
    assert refused.value.code == 2 and "already holds a run" in capsys.readouterr().err
    assert (out / "run.json").read_text() == before


if __name__ == "__main__":
    train_all(Path(sys.argv[1]), Path(sys.argv[2]))
