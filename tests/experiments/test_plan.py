"""bench.py plan: its memory against that of real steps, its figures against formulas."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench
from config import PRESETS, configure
from experiments.plan import CARDS, GIB, Trace, estimate
from model import Llama
from runtime.run import fields_of
from runtime.run_dir import write_run_file

SMALL = "--preset tiny --layers 1 --vocab-size 512 --optimizer adamw"

# Prints the planned and the real peak of two steps, in bytes, and then the same with --recompute.
MEASURE = """
import re
from pathlib import Path
import torch
from config import ModelConfig, TrainConfig
from experiments.benchmarks import Step
from experiments.plan import estimate
from model import Llama

def status(name):
    return int(re.search(rf"{name}:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def two_steps(model, config):
    step = Step(Llama(model), config, torch.float32)
    step()
    step.accumulate()
    step()

torch.set_num_threads(1)
model = ModelConfig(dim=256, layers=2, heads=4, context=128, vocab_size=4096)
two_steps(ModelConfig(dim=32, layers=1, context=16, vocab_size=64), TrainConfig())  # loads the libraries
for recompute in (False, True):
    config = TrainConfig(batch_size=8, micro_batch_size=4, optimizer="adamw", dtype="float32", recompute=recompute)
    planned = estimate(model, config, "h100", 1)["memory"]
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    two_steps(model, config)
    print(planned * 2**30, status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory from Linux's /proc")
def test_memory_is_that_of_real_steps():
    """Freed memory returns to the system at once here, so that the process has what its tensors have."""
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "PYTHONPATH": "."}
    command, root = [sys.executable, "-c", MEASURE], Path(__file__).parents[2]
    printed = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
    plain, recomputed = (tuple(map(float, line.split())) for line in printed.splitlines())
    assert plain[1] > 1.2 * recomputed[1] > 60e6
    for planned, real in (plain, recomputed):
        assert planned == pytest.approx(real, rel=0.1)


def plan(flags: str) -> dict:
    """The row of the model that `flags` describe."""
    (arguments,) = plans(flags).values()
    return estimate(*arguments)


def plans(flags: str) -> dict:
    given = {name: value for name, value in bench.parse(["plan", *flags.split()]).items() if name != "json"}
    return bench.make_config(given.pop("command"), given).plans


def test_the_model_of_a_run_is_planned_and_measured(tmp_path):
    asked = {"dim": 64, "layers": 1, "dtype": "float32"}
    model, training = configure(asked)
    run = {"asked": asked, "resolved": fields_of(model, training), "imports": []}
    write_run_file(tmp_path / "run.json", run)
    for flags, planned in (("", Llama(model)), ("--layers 2 --card t4", Llama(dim=64, layers=2))):
        found = plan(f"--config {tmp_path}/run.json {flags}")["parameters"]
        assert found == sum(weight.numel() for weight in planned.parameters())
    asked = {"config": f"{tmp_path}/run.json", "layers": 2, "rounds": 3, "device": "cpu"}
    measured = bench.make_config("train", asked)
    assert (measured.model, measured.train) == (replace(model, layers=2), replace(training, device="cpu"))


def test_parts_are_counted_and_ranks_share_them():
    one, four = plan(f"{SMALL} --micro-batch-size 2"), plan(f"{SMALL} --micro-batch-size 2 --ranks 4")
    assert one["weights"] * GIB == 4 * one["parameters"] and one["gradients"] == one["weights"]
    assert 2 * one["weights"] <= one["optimizer"] < 2.01 * one["weights"]
    assert one["memory"] == sum(one[part] for part in ("weights", "gradients", "optimizer", "activations"))
    assert four["tokens/s"] > 2 * one["tokens/s"] and four["MFU"] < one["MFU"]
    sharded = plan(f"{SMALL} --micro-batch-size 2 --ranks 4 --shard")
    assert all(sharded[part] == four[part] / 4 for part in ("weights", "gradients", "optimizer"))
    block = 4 * (4 * 128 * 128 + 3 * 128 * 352 + 2 * 128) / GIB  # two blocks' gradients are whole, and weights in bf16
    assert sharded["gathered"] == pytest.approx(one["weights"] - block + 3 * block) and four["gathered"] == 0
    assert sharded["activations"] == pytest.approx(four["activations"] - block / 2)
    full = plan(f"{SMALL} --micro-batch-size 2 --ranks 4 --shard --dtype float32")
    assert full["gathered"] == pytest.approx(one["weights"] - block + 4 * block)
    accumulating = plan(f"{SMALL} --micro-batch-size 1 --ranks 4 --shard")
    assert accumulating["gradients"] == 4 * accumulating["weights"]  # whole until the last micro-batch


def test_time_is_that_of_the_slower_of_memory_and_arithmetic():
    """1000 FLOP/s and 10 bytes/s. A compiler adds and multiplies in one kernel, which writes what is read later."""
    x, y = torch.ones(10, 10), torch.ones(10, 10)
    with Trace([], [], 1000.0, 10.0) as trace:
        z = x @ y  # 1200 bytes, 2000 FLOPs
        assert trace.seconds == 120
        z = (z + x) * y  # reads 1200 bytes
        assert trace.seconds == 120 + 120 and trace.unread() == 40
        trace.peak_flops = 1.0
        z = z @ x  # z is written by the kernel before; 2000 FLOPs take longer than 1200 bytes
        assert trace.seconds == 240 + 40 + 2000 and trace.unread() == 0
        assert trace.live == 3 * 400 and trace.peak == 5 * 400  # both z, and the sum


def test_traced_flops_are_those_of_the_formula(monkeypatch):
    """A card with endless bandwidth reaches an MFU of 1, except for what flash attention's backward computes again."""
    monkeypatch.setitem(CARDS, "h100", CARDS["h100"]._replace(bandwidth=1e30))
    row = plan(f"{SMALL} --kv-heads 1 --batch-size 2")
    flops = 6 * (512 * 128 + 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352) + 6 * 128 * 256
    assert row["MFU"] == pytest.approx(flops / (flops + 128 * 256), rel=1e-4)


def test_the_largest_preset_fits_the_cards_that_the_help_names():
    """As far as two blocks tell: memory grows by the same amount with each. A fifth is left for what is not seen."""
    one, two = (plan(f"--preset 7b --ranks 8 --layers {layers}")["memory"] for layers in (1, 2))
    assert (one + (PRESETS["7b"]["layers"] - 1) * (two - one)) * GIB < 0.8 * CARDS["h100"].memory


def test_without_flags_every_preset_is_planned():
    for card, half, sharded in (("h100", "bfloat16", "bfloat16"), ("t4", "float16", "float32")):
        found = plans(f"--ranks 8 --card {card}")
        assert list(found) == list(PRESETS) and found["small"][1].dtype == half and found["7b"][1].dtype == sharded
