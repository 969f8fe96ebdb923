"""The plan on paper: its memory against the memory of real steps, its counts against formulas."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train
from config import PRESETS, configs_from
from experiments.plan import PlanConfig, bench_plan
from model import Llama
from norms import KINDS, TRAITS
from runtime.device import CARDS, Card
from runtime.plan import Launch, Plan, Trace, compiled_seconds, eager_seconds, fused, simulated

ROOT = Path(__file__).parents[2]
CARD = Card("a card", flops=1000.0, bandwidth=10.0, memory=1.0)

# Prints the simulated peak of a training step and the real one, both without what is there before the model is built,
# and then the same with --recompute.
MEASURE = """
import gc, re, sys
from dataclasses import replace
from pathlib import Path
import numpy as np, torch
import train
from config import ModelConfig, TrainConfig
from data.prepare import Prepared
from data.tokenizer import ByteTokenizer
from data.prepare import TokenFile
from runtime.plan import simulated
from runtime.run import Run

torch.set_num_threads(1)
model = ModelConfig(dim=256, layers=3, heads=4, context=192, vocab_size=4096)
tokens = TokenFile(np.zeros(model.context + 1, np.uint16), 0, 0)
data = Prepared(tokens, tokens, ByteTokenizer(), "", "")
def two_steps(run):
    trainer = train.Trainer(run)
    trainer.update(1e-3)
    trainer.update(1e-3)

def status(name):
    return int(re.search(rf"{name}:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

for recompute in (False, True):
    config = TrainConfig(
        batch_size=8, micro_batch_size=4, optimizer="adamw", device="cpu", fast=False, recompute=recompute
    )
    run = Run(Path(), model, config, torch.device("cpu"), torch.float32, data)
    with simulated() as trace:
        two_steps(run)
    two_steps(replace(run, model_config=replace(model, dim=32, hidden_dim=64, context=16)))  # loads the libraries
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    two_steps(run)
    print(trace.peak, status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory from Linux's /proc")
def test_simulated_memory_is_that_of_real_steps():
    """Freed memory returns to the system at once here, so that the process has what its tensors have."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        cwd=ROOT,
        env={"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    )
    plain, recomputed = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert plain[1] > 1.5 * recomputed[1] > 50e6
    for simulated_bytes, real_bytes in (plain, recomputed):
        assert simulated_bytes == pytest.approx(real_bytes, rel=0.1)


def test_a_trace_knows_what_is_alive():
    with simulated() as trace:
        a = torch.ones(1000)
        b = a[:500].view(50, 10)  # no memory of its own
        c = a.add(1).mul_(2)
        assert trace.live == 8000
        del a, b, c
        assert trace.live == 0 and trace.peak == 8000
        assert [(launch.name, sum(launch.writes.values())) for launch in trace.launches] == [
            ("ones", 4000),
            ("add", 4000),
            ("mul_", 4000),
        ]


def test_a_lookup_reads_as_much_as_it_returns():
    """Five of a thousand rows, by int64 ids."""
    with simulated() as trace:
        torch.nn.functional.embedding(torch.zeros(5, dtype=torch.int64), torch.zeros(1000, 8))
    lookup = trace.launches[-1]
    assert lookup.name == "embedding" and lookup.flops == 0
    assert sorted(lookup.reads.values()) == [5 * 8, 5 * 8 * 4] and list(lookup.writes.values()) == [5 * 8 * 4]


def test_time_is_that_of_the_slower_of_memory_and_arithmetic():
    product = Launch("mm", 3000.0, {1: 4, 2: 4}, {3: 2})  # 10 bytes in 1 s, 3000 FLOPs in 3 s
    add = Launch("add", 0.0, {3: 20, 4: 20}, {5: 10})
    assert eager_seconds([product, add], CARD) == 3 + 5


def test_a_compiler_writes_only_what_is_read_later():
    launches = [
        Launch("mm", 10.0, {0: 1}, {1: 100}),
        Launch("mul", 0.0, {1: 100}, {2: 100}),
        Launch("add", 0.0, {1: 100, 2: 100}, {3: 100}),
        Launch("mm", 10.0, {3: 100}, {4: 1}),
        Launch("add_", 0.0, {5: 50}, {5: 50}),
    ]
    merged = fused(launches, alive={5})
    assert [(launch.reads, launch.writes) for launch in merged[1:]] == [
        ({1: 100}, {3: 100}),
        ({3: 100}, {}),
        ({5: 50}, {5: 50}),
    ]
    assert compiled_seconds(launches, {5}, CARD) == pytest.approx((101 + 200 + 100 + 100) / 10)


def make_plan(flags: str) -> train.Plan:
    return train.plan(train.parse(["--plan", *flags.split()]))


SMALL = "--preset tiny --layers 2 --optimizer adamw"


def test_a_plan_counts_parameters_arithmetic_and_memory(monkeypatch):
    peaks, start = [], Trace.start

    def note_peak(trace: Trace, *args) -> None:
        peaks.append(trace.peak)  # so far
        start(trace, *args)

    monkeypatch.setattr(Trace, "start", note_peak)
    flags = "--preset tiny --layers 3 --qk-norm full --optimizer adamw --micro-batch-size 4"
    plan = make_plan(flags)
    assert plan.memory == peaks[1]  # of the step between the two starts
    assert plan.gradients == plan.weights  # in the second micro-batch, where the peak is
    model_config, config = configs_from(train.parse(flags.split()), "cpu")
    model = Llama(model_config)
    tokens = config.batch_size * model_config.context
    assert plan.parameters == sum(weight.numel() for weight in model.parameters())
    assert plan.weights == 4 * plan.parameters and plan.optimizer_state >= 2 * plan.weights
    assert plan.flops_per_token == train.flops_per_token(model)
    assert plan.tokens_per_second(2.0) == tokens / 2
    card = CARDS["h100"]
    assert plan.mfu(2.0) == pytest.approx(tokens * plan.flops_per_token / 2 / card.flops)


BY_HAND = Plan(
    card="l4", ranks=2, shard=True, recompute=False, parameters=1_234_567, flops_per_token=6e9, sequences=8,
    context=1000, micro_batch_size=2, micro_batches=2, weights=1 << 30, gradients=2 << 30, optimizer_state=4 << 30,
    gathered=8 << 30, activations=1 << 29, launches=4321, eager_seconds=2.0, compiled_seconds=1.0,
)  # fmt: skip


def test_what_a_plan_prints_by_hand():
    """8000 tokens in 2 s are 24 TFLOP/s, a tenth of the 242 of two L4, each with 24 GB and 300 GB/s."""
    assert BY_HAND.memory == 15.5 * 2**30 and BY_HAND.mfu(2.0) == pytest.approx(24 / 242)
    assert str(BY_HAND).splitlines() == [
        "1,234,567 parameters, 6e+09 FLOPs per token",
        "peak memory per rank, simulated: 15.5 GiB of 22.4 on L4: weights 1.0, gradients 2.0, optimizer state 4.0, "
        "gathered blocks 8.0, activations and the rest 0.5",
        "a step: 8 sequences of 1000 tokens; per rank 2 micro-batches of 2, 4,321 launches without --compile",
        "roofline without --compile: 2 s, 4,000 tokens/s, MFU 9.9%",
        "roofline with --compile: 1 s, 8,000 tokens/s, MFU 19.8%",
        "The roofline is an upper bound on speed: all data at 0.3 TB/s, all matrix products at 121 TFLOP/s, no "
        "communication.",
        "With --compile it is an estimate: everything between two matrix products counts as one kernel.",
    ]


def test_the_table_of_plans_by_hand(monkeypatch):
    monkeypatch.setattr(train, "plan", lambda flags: replace(BY_HAND, card=flags.card))
    found = bench_plan(PlanConfig(card="l4"), torch.device("cpu"))["rows"]
    assert [(row["preset"], row["variant"]) for row in found[:5]] == [
        *(("tiny", variant) for variant in ("plain", "recompute", "shard", "shard, recompute")),
        ("small", "plain"),
    ]
    parts = [found[0][name] for name in ("memory", "weights", "gradients", "optimizer", "gathered", "activations")]
    assert parts == [15.5, 1, 2, 4, 8, 0.5] and found[0]["fits"]
    speeds = [found[0][f"{mode} {name}"] for mode in ("eager", "compiled") for name in ("s", "tokens/s", "MFU")]
    assert speeds == pytest.approx([2, 4000, 24 / 242, 1, 8000, 48 / 242])
    monkeypatch.setattr(train, "plan", lambda flags: replace(BY_HAND, activations=8 << 30))
    assert not bench_plan(PlanConfig(card="l4"), torch.device("cpu"))["rows"][0]["fits"]  # 23 GiB are 24.7 GB


def test_traced_flops_are_those_of_the_formula(monkeypatch):
    """But for flash attention's backward, which computes the scores again: a sixth of attention's FLOPs."""
    traced: list[Launch] = []

    def note(launches: list[Launch], alive: set[int], card: Card) -> float:
        traced.extend(launches)
        return 1.0

    monkeypatch.setattr("runtime.plan.compiled_seconds", note)
    plan = make_plan(f"{SMALL} --kv-heads 1 --batch-size 2")
    again = 2 * 128 * 256  # layers × dim × context
    assert sum(launch.flops for launch in traced) == (plan.flops_per_token + again) * 2 * 256


def test_recomputation_trades_launches_for_memory():
    plain, less = make_plan(SMALL), make_plan(f"{SMALL} --recompute")
    assert less.memory < 0.9 * plain.memory
    assert less.launches > 1.1 * plain.launches and less.eager_seconds > plain.eager_seconds


def test_ranks_share_the_batch_and_shards_the_weights():
    one, four = make_plan(f"{SMALL} --micro-batch-size 2"), make_plan(f"{SMALL} --micro-batch-size 2 --ranks 4")
    assert (one.micro_batches, four.micro_batches) == (4, 1) and one.sequences == four.sequences == 8
    assert four.eager_seconds < one.eager_seconds / 2
    sharded = make_plan(f"{SMALL} --micro-batch-size 2 --ranks 4 --shard")
    for part in ("weights", "gradients", "optimizer_state"):
        assert getattr(sharded, part) == getattr(four, part) // 4
    accumulating = make_plan(f"{SMALL} --micro-batch-size 1 --ranks 4 --shard")
    assert accumulating.gradients == 4 * accumulating.weights  # whole until the last micro-batch
    assert sharded.activations == four.activations and four.gathered == 0
    model = Llama(configs_from(train.parse(SMALL.split()), "cpu")[0])
    block = sum(weight.numel() for weight in model.layers[0].parameters())  # weights and gradients of two are whole
    assert sharded.gathered == four.weights - 4 * 2 * block + 4 * 4 * block


def test_micro_batches_repeat_and_ranks_share_the_update_of_a_shard():
    """With 2, 4 and 8 micro-batches, all that grows is by the same for each. The rest is the update."""
    two, four, eight = (
        make_plan(f"{SMALL} --layers 1 --micro-batch-size 2 --batch-size {rows}") for rows in (4, 8, 16)
    )
    assert [plan.micro_batches for plan in (two, four, eight)] == [2, 4, 8]
    for name in ("launches", "eager_seconds", "compiled_seconds"):
        small, middle, large = (getattr(plan, name) for plan in (two, four, eight))
        assert large - middle == pytest.approx(2 * (middle - small)) and small < middle < 2 * small
    update = 2 * two.eager_seconds - four.eager_seconds
    shard = make_plan(
        f"{SMALL} --layers 1 --micro-batch-size 2 --batch-size 16 --ranks 4 --shard"
    )  # 2 micro-batches each
    assert shard.eager_seconds == pytest.approx(two.eager_seconds - update * 3 / 4)


def test_no_rank_shares_the_update_of_muon():
    """Each orthogonalizes whole matrices, also those of a shard."""
    flags = f"{SMALL} --layers 1 --optimizer muon --micro-batch-size 1"
    one, shard = make_plan(f"{flags} --batch-size 1"), make_plan(f"{flags} --batch-size 4 --ranks 4 --shard")
    assert shard.eager_seconds == pytest.approx(one.eager_seconds)
    assert shard.compiled_seconds == pytest.approx(one.compiled_seconds)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_norm_has_a_plan(kind):
    placement = "rezero" if TRAITS[kind].identity else "pre"
    plan = make_plan(f"{SMALL} --layers 1 --norm {kind} --placement {placement} --dropout 0.1")
    assert plan.memory > plan.weights + plan.optimizer_state > plan.weights


def test_the_command_prints_a_plan_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main(f"{SMALL} --plan --ranks 2 --card l4".split())
    printed = capsys.readouterr().out
    for expected in ("parameters", "FLOPs per token", "optimizer state", "on L4", "launches", "MFU"):
        assert expected in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--plan --ranks 0", "--ranks"),
        ("--plan --ranks 3", "--batch-size 64"),
        ("--plan --ranks 4 --micro-batch-size 8 --batch-size 48", "--micro-batch-size"),
        ("--plan --card h9", "h9"),
        ("--plan --dtype float32", "--dtype"),
        ("--plan --resume", "--resume"),
        ("--plan --shard", "--shard"),
        ("--plan --shard --ranks 2 --dtype float16", "--dtype"),
        ("--plan --ranks 2 --norm batchnorm", "--norm batchnorm"),
        ("--plan --norm batchnorm --compile --recompute", "--recompute"),
        ("--plan --device gpu", "--device 'gpu'"),
        ("--plan --device cpu", "--device cpu"),
        ("--ranks 2", "--plan"),
        ("--card h100", "--plan"),
    ],
)
def test_bad_plans_end_in_one_line(flags, named, capsys):
    with pytest.raises(SystemExit) as ended:
        train.main(flags.split())
    error = capsys.readouterr().err
    assert ended.value.code == 2 and named in error and error.count("\n") == 1


# The card each preset is for, with a fifth of its memory left for what the simulation does not see.
FITS = {
    "tiny": "--card l4",
    "small": "--card l4",
    "124m": "--card l4",
    "1b": "--card h100",
    "7b": "--card h100 --ranks 8 --shard",
}
SLOW = ("124m", "1b", "7b")


def test_presets_fit_their_card_as_far_as_a_few_blocks_tell():
    """Memory grows by the same amount with each block."""
    for preset in SLOW:
        one, two = (make_plan(f"--preset {preset} {FITS[preset]} --layers {layers}") for layers in (1, 2))
        whole = one.memory + (PRESETS[preset]["layers"] - 1) * (two.memory - one.memory)
        assert whole < 0.8 * CARDS[one.card].memory, preset


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in PRESETS]
)
def test_presets_fit_their_card(preset):
    plan = make_plan(f"--preset {preset} {FITS[preset]}")
    assert plan.memory < 0.8 * CARDS[plan.card].memory
