"""train.py on several ranks. The ranks are forks, so torch is imported once. Each trains several runs in turn."""

import errno
import gc
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import train
from config import ModelConfig, TrainConfig
from files import InUse, lock_file
from machine import distributed
from model import Llama
from roles import draw_weights
from runtime.checkpoint import find_checkpoint
from runtime.parallel import Parallel, matrices_on_meta
from runtime.run import check_options
from runtime.run_dir import LOCK
from tests.test_compile import count_graphs

COMMON = "--dim 32 --layers 2 --heads 2 --context 32 --batch-size 8 --tokenizer bytes --device cpu --dtype float32 "
COMMON += "--eval-tokens 2000 --eval-every 5 --save-every 100"
CASES = {  # trained on one rank, and on two with DDP and FSDP2, where "accumulated" is compiled
    "muon": "--steps 8",
    "accumulated": "--steps 8 --optimizer adamw --micro-batch-size 2 --no-tie-embeddings --norm dyt --recompute "
    "--kv-heads 1 --clip 0.5 --z-loss 0.1",
    "ngpt": "--steps 4 --optimizer adamw --placement ngpt",
}
COMPARED = [("ddp", "muon"), ("ddp", "accumulated"), ("fsdp", "muon"), ("fsdp", "accumulated"), ("fsdp", "ngpt")]
LONG = "--steps 10 --save-every 5 --dropout 0.1 --shard"
ENDS = {  # flags, the exit code of every rank, and what rank 0 prints; the other one prints nothing
    "odd": ("--batch-size 7", 2, "error: --batch-size 7 cannot be split evenly over 2 ranks"),
    "nonsense": ("--nonsense", 2, "unrecognized arguments: --nonsense"),
    "diverges": ("--norm none --lr 1e9 --clip 0 --warmup 0", 5, "not finite"),
    "stopped": ("", 143, "stopped by SIGTERM; continue with python "),
    "in-use": ("", 4, "in use"),
    "full": ("", 1, "step-000020 cannot be written: No space left on device"),  # where rank 0 writes
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills a rank")


# --- in the ranks ----------------------------------------------------------------------------------------------------


def train_and_record(command: str) -> dict[str, Any]:
    """Run train.py in this process: its exit code, what it prints on standard error, and had before ranks last met."""
    batch, evaluate, errors, code = train.training_batch, train.evaluate, StringIO(), 0
    gather, printed = distributed.all_gather, [""]

    def batch_or_stop(tokens, seed, step, *rest):
        if command.endswith("stopped") and step == 4 and distributed.rank():
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(tokens, seed, step, *rest)

    def evaluate_or_die(*arguments):
        if command.endswith("killed") and distributed.rank() and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(*arguments)

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(errors):
        patch.setattr(train, "training_batch", batch_or_stop)
        patch.setattr(train, "evaluate", evaluate_or_die)
        graphs = count_graphs(patch)
        patch.setattr(train, "SAMPLE_TOKENS", 8)
        patch.setattr(distributed, "all_gather", lambda x: printed.__iadd__([errors.getvalue()]) and gather(x))
        if command.endswith("full") and distributed.is_main():
            full = OSError(errno.ENOSPC, "No space left on device")
            patch.setattr("runtime.checkpoint.save_tensors", Mock(side_effect=full))
        if command.endswith("undisturbed"):
            patch.setattr(train, "SHARDED_SAMPLE", 0)
        patch.setattr("pages.html.image_of", lambda plot, kind: b"")  # takes longer than training
        try:
            train.main(command.split())
        except SystemExit as exited:
            code = int(exited.code or 0)
    return {"code": code, "errors": errors.getvalue(), "met": printed[-1], "graphs": len(graphs)}


def train_all(folder: Path) -> None:
    time.sleep(0.5 * (os.environ["RANK"] == "0"))  # rank 1 of a restart must not take the earlier address
    with distributed.process_group():
        commands = json.loads((folder / "commands.json").read_text())
        records = {name: train_and_record(command) for name, command in commands.items()}
        (folder / f"rank{distributed.rank()}.json").write_text(json.dumps(records))


def launch(folder: Path) -> None:
    """As `torchrun --standalone --nproc-per-node 2 --max-restarts 1`. It replaces the signal handlers of a process."""
    gc.freeze()  # collecting what belongs to threads of the tests, which a fork lacks, may crash
    how = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=1, start_method="fork")
    elastic_launch(how, train_all)(folder)


# --- around the ranks ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def common(folder: Path, text: Path) -> str:
    """Flags of all runs."""
    return f"{COMMON} --data {text} --cache-dir {folder / 'cache'}"


@pytest.fixture(scope="module")
def trained(folder: Path, common: str) -> dict[str, list[dict[str, Any]]]:
    """How each rank has ended, of each run on two. The runs on one rank are trained here."""
    for name, flags in CASES.items():
        train_and_record(f"{common} {flags} --out {folder}/one-{name}")
    commands = {f"{engine}-{name}": CASES[name] + " --shard" * (engine == "fsdp") for engine, name in COMPARED}
    commands |= {name: f"{flags} --compile" for name, flags in commands.items() if name.endswith("accumulated")}
    commands |= {name: f"--steps 20 {flags}" for name, (flags, _, _) in ENDS.items()}
    commands = {"killed": LONG, "undisturbed": LONG} | commands
    commands = {name: f"{common} {flags} --out {folder}/{name}" for name, flags in commands.items()}
    (folder / "commands.json").write_text(json.dumps(commands))
    (folder / "in-use").mkdir()
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(folder,))
    with lock_file(folder / "in-use" / LOCK):
        launcher.start()
        launcher.join(500)
        launcher.terminate()
    assert launcher.exitcode == 0
    by_rank = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return {name: [by_rank[0][name], by_rank[1][name]] for name in commands}


def series(run: Path, *names: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows for name in names if name in row]


@pytest.mark.parametrize(("engine", "name"), COMPARED)
def test_two_ranks_train_as_one(engine, name, trained, folder):
    """From the same weights, on the same rows. Sums have another order, so their last digits may differ."""
    one, two = folder / f"one-{name}", folder / f"{engine}-{name}"
    assert [rank["code"] for rank in trained[two.name]] == [0, 0]
    assert [rank["graphs"] for rank in trained[two.name]] == [2 * (name == "accumulated")] * 2  # blocks, and terms
    for figure in ("train_loss", "val_loss", "val_bpb", "grad_norm", *["z_loss"] * (name == "accumulated")):
        assert series(two, figure) == pytest.approx(series(one, figure), rel=1e-5), figure
    assert (two / "samples.txt").read_text() == (one / "samples.txt").read_text()
    found, expected = (load_file(find_checkpoint(run) / "model.safetensors") for run in (two, one))
    assert found.keys() == expected.keys()
    for key in expected:  # after 8 steps with learning rates of 0.015
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ENDS)
def test_every_rank_ends_with_the_same_code_and_one_prints(name, trained, folder):
    ranks, (_, code, message) = trained[name], ENDS[name]
    assert [rank["code"] for rank in ranks] == [code, code]
    assert message in ranks[0]["errors"] and ranks[1]["errors"] == ""
    assert message in ranks[0]["met"] or name in ("nonsense", "full"), "it is killed when another rank has ended"
    assert (folder / name).exists() == (code != 2)
    if name == "stopped":  # after the same step, with a checkpoint
        assert find_checkpoint(folder / name).name == "step-000005"


def test_a_checkpoint_of_two_ranks_resumes_on_one(trained, folder):
    losses = []
    for run in (folder / "one-muon", folder / "fsdp-muon"):
        train_and_record(f"--resume --steps 14 --schedule constant --out {run}")
        losses.append(series(run, "train_loss", "val_loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[0]) == len(set(losses[0])) == 8
    assert json.loads((folder / "fsdp-muon/run.json").read_text())["resolved"]["shard"] is False


def test_a_killed_rank_is_restarted_and_the_run_continues(trained, folder):
    """It is killed between saving and evaluating."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        found, expected = (find_checkpoint(folder / run) / name for run in ("killed", "undisturbed"))
        assert found.read_bytes() == expected.read_bytes()
    assert series(folder / "killed", "step") == series(folder / "undisturbed", "step")
    assert (folder / "killed/samples.txt").read_text() and not (folder / "undisturbed/samples.txt").read_text()
    assert [each["step"] for each in json.loads((folder / "killed/run.json").read_text())["resumed"]] == [5]


# --- in one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("options", [{}, {"placement": "sandwich"}, {"placement": "ngpt"}, {"norm": "dyt"}], ids=str)
def test_sharding_has_the_matrices_of_a_block_in_bfloat16_and_changes_no_bit(options, recompute, one_rank):
    """Two micro-batches under autocast, against the same without sharding. The matrices are drawn after sharding."""
    make = partial(Llama, dim=32, layers=2, heads=2, context=8, vocab_size=50, seed=3, **options)
    plain = make()
    with matrices_on_meta():
        sharded = make()
    matrices = {f"{path}.weight" for path, layer in plain.layers.named_modules() if hasattr(layer, "role")}
    meta = {name for name, weight in sharded.named_parameters() if weight.is_meta}
    assert meta == {"embed_tokens.weight", *(f"layers.{name}" for name in matrices)}
    parallel, streams = Parallel(sharded, True, torch.device("cpu"), torch.bfloat16), set()
    draw_weights(sharded, 3, distributed.copy)
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, distributed.full_tensor(sharded.get_parameter(name))), name

    def record(block, arguments):
        streams.add(arguments[0].dtype)
        low = {name for name, weight in sharded.layers.named_parameters() if weight.dtype == torch.bfloat16}
        assert low == {name for name in matrices if sharded.layers[int(name[0])] is block}

    for block in sharded.layers:
        block.register_forward_pre_hook(record)
    pairs = list(torch.randint(50, (2, 2, 3, 8), generator=torch.Generator().manual_seed(0)))
    found, scaler = [], train.GradScaler("cpu", enabled=False)
    for model, batches in ((plain, pairs), (sharded, parallel.micro_batches(pairs))):
        model.recompute = recompute
        terms = train.accumulate_gradients(model.objective, batches, 2, torch.bfloat16, scaler)
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        found.append(terms | {name: distributed.full_tensor(grad) for name, grad in grads.items()})
    assert streams == {torch.float32}
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("left", ["a folder", "a checkpoint"])
def test_a_restart_continues_what_its_launch_has_left(left, monkeypatch, tmp_path, common, refused):
    """Also with --preset, which --resume alone refuses."""
    out = tmp_path / "run"
    flags = f"--preset tiny {common} --steps 6 --save-every 3".split()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/none_gx1fz/attempt_0/0/error.json")
    if left == "a folder":
        out.mkdir()
        (out / ".lock").touch()
    else:
        train.main([*flags, "--out", str(out)])
        shutil.rmtree(out / "checkpoints/step-000006")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/none_gx1fz/attempt_1/0/error.json")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    train.main([*flags, "--out", str(out)])
    assert find_checkpoint(out).name == "step-000006"
    assert ("resumed" in json.loads((out / "run.json").read_text())) == (left == "a checkpoint")
    assert "--max-restarts needs --out" in refused(train.main, flags)


@pytest.mark.parametrize("error", [ValueError("a"), OSError(errno.ENOSPC, "b"), InUse("c")], ids=repr)
def test_an_error_of_a_rank_is_sent_to_all(error, monkeypatch):
    gather = Mock(side_effect=lambda found: [None, pickle.loads(pickle.dumps(found))])
    monkeypatch.setattr(distributed, "all_gather", gather)
    with pytest.raises(type(error)) as raised, distributed.raise_on_all_ranks():
        raise error
    assert raised.value is error
    gather.assert_called_once_with(error)


def test_what_several_ranks_refuse(monkeypatch, refused):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as of deepspeed
    assert "would train alone; use torchrun --nproc-per-node N" in refused(train.main, ["--device", "cpu"])
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    distributed.check_device(torch.device("cpu"))
    for device, cards in (("cuda:1", 2), ("cuda", 0)):
        monkeypatch.setattr("torch.cuda.device_count", Mock(return_value=cards))
        with pytest.raises(ValueError, match=f"--device {device}: each rank needs its own GPU"):
            distributed.check_device(torch.device(device))
    check_options(ModelConfig(), TrainConfig(batch_size=6, micro_batch_size=6), 2)  # a rank's share
    wrong: dict[str, dict[str, Any]] = {
        "12 cannot be split evenly over 2 ranks": {"batch_size": 12, "micro_batch_size": 4},
        "--shard needs --dtype": {"shard": True, "dtype": "float16"},
        "--watch .* --no-shard": {"shard": True, "watch": 5},
    }
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=message):
            check_options(ModelConfig(), TrainConfig(**options), 2)
