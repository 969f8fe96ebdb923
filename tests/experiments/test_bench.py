"""bench.py: every candidate is measured, the printed report is the written one, and bad flags end with one line."""

import json
import os
import statistics
from typing import Any

import pytest
import torch

import bench
from experiments import benchmarks
from model import Llama
from norms import KINDS
from norms.rmsnorm import RMSNorm
from optim import Muon

MODEL = "--dim 32 --layers 2 --heads 2 --hidden-dim 64 --vocab-size 100 --context 16 --rounds 1 --device cpu"


def report_of(command: str, path) -> dict:
    bench.main([*command.split(), "--out", str(path)])
    return json.loads(path.read_text())


def has_fast_rows(report: dict) -> bool:
    """Whether the kernels of fast/ were measured, which depends on the machine."""
    return report["fast"].startswith("measured")


@pytest.fixture
def accelerated(monkeypatch) -> list:
    """The modules that were accelerated, by a stand-in for fast/ that gives RMSNorm another class."""

    class FastRMSNorm(RMSNorm):
        pass

    modules = []

    def accelerate(module):
        modules.append(module)
        for part in module.modules():
            if type(part) is RMSNorm:
                part.__class__ = FastRMSNorm
        return module

    monkeypatch.setattr(benchmarks, "resolve_fast", lambda wanted, device, compiled=False: not compiled)
    monkeypatch.setattr(benchmarks, "accelerate", accelerate)
    return modules


def test_every_norm_is_measured_alongside_those_of_pytorch(tmp_path, capsys):
    report = report_of("norms --rows 64 --dim 64 --rounds 3 --device cpu", tmp_path / "new" / "norms.json")
    printed = capsys.readouterr().out
    for dtype in ("float32", "bfloat16"):
        rows = {row["norm"]: row for row in report["rows"] if row["dtype"] == dtype}
        assert rows.keys() >= KINDS.keys() - {"none"} | {"F.layer_norm", "F.rms_norm"}
        fast = {"rmsnorm, fast", "layernorm, fast"} if has_fast_rows(report) else set()
        assert {name for name in rows if "fast" in name} == fast
        assert rows["F.layer_norm"]["forward ratio"] == rows["F.layer_norm"]["both ratio"] == 1
        for name, row in rows.items():
            assert min(row["both ms"], row["forward ms"]) > 0
            assert row["forward ratio"] == pytest.approx(row["forward ms"] / rows["F.layer_norm"]["forward ms"])
            line = next(line for line in printed.splitlines() if line.startswith(f"{name} ") and dtype in line)
            assert line.split()[-6:] == [f"{value:.3g}" for value in list(row.values())[2:]]
        assert statistics.median(row["both ms"] / row["forward ms"] for row in rows.values()) > 1
        copy_ms = 1e3 * 2 * 64 * 64 * getattr(torch, dtype).itemsize / (1e9 * report[f"copy in {dtype}, GB/s"])
        assert rows["rmsnorm"]["forward fraction"] == pytest.approx(copy_ms / rows["rmsnorm"]["forward ms"])
    assert report["command"][:2] == ["bench.py", "norms"]
    assert f"fast: {report['fast']}" in printed


def test_accelerated_norms_have_rows_of_their_own(accelerated, tmp_path):
    report = report_of("norms --rows 8 --dim 16 --rounds 1 --device cpu", tmp_path / "report.json")
    assert has_fast_rows(report)
    assert {row["norm"] for row in report["rows"] if "fast" in row["norm"]} == {"rmsnorm, fast"}


@pytest.fixture
def takes(monkeypatch):
    """`takes(seconds)` gives calls these seconds by a part of their names, and returns the calls that were timed."""

    def give(seconds: dict[str, float]) -> dict:
        timed = {}

        def time_alternately(calls, rounds, device):
            timed.update(calls)
            return {name: next(seconds[part] for part in seconds if part in name) for name in calls}

        monkeypatch.setattr(benchmarks, "time_alternately", time_alternately)
        return timed

    return give


def test_shares_of_norms_by_hand(takes, tmp_path):
    """A copy of 64 × 64 numbers takes 2 µs. Forward moves as many bytes as a copy, forward and backward 2.5 times."""
    takes({"copy": 2e-6, "F.layer_norm forward": 3e-6, "F.layer_norm both": 5e-6, "forward": 4e-6, "both": 2e-5})
    report = report_of("norms --rows 64 --dim 64 --device cpu", tmp_path / "report.json")
    assert report["copy in float32, GB/s"] == pytest.approx(2 * 64 * 64 * 4 / 2e-6 / 1e9)
    assert report["copy in bfloat16, GB/s"] == pytest.approx(2 * 64 * 64 * 2 / 2e-6 / 1e9)
    rows = {row["norm"]: [row[name] for name in list(row)[2:]] for row in report["rows"] if row["dtype"] == "float32"}
    assert rows["dyt"] == pytest.approx([4e-3, 4 / 3, 2 / 4, 2e-2, 20 / 5, 2.5 * 2 / 20])
    assert rows["F.layer_norm"] == pytest.approx([3e-3, 1, 2 / 3, 5e-3, 1, 2.5 * 2 / 5])


def test_shares_of_a_training_step_by_hand(takes, accelerated, monkeypatch, tmp_path):
    """The product of two 10² matrices has 2000 FLOPs and takes 1 ms; the step of 2 sequences of 16 tokens half a s."""
    memory = iter([3e6, 10e6])
    monkeypatch.setattr(benchmarks, "peak_memory", lambda device: next(memory))
    monkeypatch.setattr(benchmarks, "PRODUCT_SIZE", {"cpu": 10})
    takes({"product": 1e-3, "plain": 0.5, "fast": 0.25})
    report = report_of(f"train {MODEL} --batch-size 2 --dtype float32", tmp_path / "report.json")
    flops = 6 * (100 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64)) + 6 * 2 * 32 * 16
    plain, fast = report["rows"]
    bound = 2000 / 1e-3 / flops
    assert (plain["tokens/s"], plain["upper bound"], fast["tokens/s"]) == (64, round(bound), 128)
    assert (plain["fraction"], fast["fraction"]) == pytest.approx((64 / bound, 128 / bound))
    assert report["product in float32, TFLOP/s"] == pytest.approx(2000 / 1e-3 / 1e12)
    assert report["memory of a step, MB"] == 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shares_of_generation_by_hand(dtype, takes, accelerated, monkeypatch, tmp_path):
    """15 tokens of each of 3 samples in 2 s, while the weights can be read 15 times in 0.5 s."""
    read, generated = [], []

    def stream_ids(model, prompts, sampling):
        generated.append((model.lm_head.weight.dtype, len(prompts), sampling.tokens, sampling.temperature))
        return iter(())

    monkeypatch.setattr(torch, "dot", lambda a, b: read.append(a.nbytes + b.nbytes))
    monkeypatch.setattr(benchmarks, "stream_ids", stream_ids)
    timed = takes({"reading": 0.5, "plain": 2.0, "fast": 1.0})
    report = report_of(f"generate {MODEL} --dtype {dtype} --tokens 15 --samples 3", tmp_path / "report.json")
    timed[f"reading torch.{dtype}"]()
    timed[f"plain torch.{dtype} 3"]()
    assert generated == [(getattr(torch, dtype), 3, 15, 0)]  # greedily
    weights = 100 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64)  # tied, and those of the norms hardly count
    size = weights * {"float32": 4, "bfloat16": 2}[dtype]
    assert len(read) == 15 and read[0] == pytest.approx(size, rel=0.01)
    found = [(row["model"], row["samples"], row["tokens/s"], row["upper bound"]) for row in report["rows"]]
    assert found == [("plain", 1, 8, 30), ("plain", 3, 22, 90), ("fast", 1, 15, 30), ("fast", 3, 45, 90)]
    assert [row["fraction"] for row in report["rows"]] == [0.25, 0.25, 0.5, 0.5]


@pytest.mark.parametrize(("optimizer", "recompute"), [("adamw", False), ("muon", True)])
def test_a_measured_step_updates_all_weights_and_leaves_no_gradients(optimizer, recompute):
    config = benchmarks.StepConfig(
        dim=32, layers=1, heads=2, vocab_size=100, context=16, batch_size=2, optimizer=optimizer, recompute=recompute
    )
    model = Llama(config.model_config())
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    step: Any = benchmarks.make_step(model, config, torch.float32)
    step()
    assert model.recompute == recompute
    assert any(isinstance(optimizer, Muon) for optimizer in step.args[1]) == (optimizer == "muon")
    for name, weight in model.named_parameters():
        assert not torch.equal(weight, before[name]) and weight.grad is None


def test_gradients_of_a_measured_norm_do_not_add_up():
    norm, x = RMSNorm(16), torch.randn(3, 16, requires_grad=True)
    gradients = list[list[torch.Tensor]]()
    for _ in range(2):
        benchmarks.forward_backward(norm, x, torch.ones(3, 16))
        gradients.append(
            [tensor.grad.clone() for tensor in (x, norm.get_parameter("weight")) if tensor.grad is not None]
        )
    assert len(gradients[0]) == 2 and all(map(torch.equal, *gradients))


def test_both_dtypes_are_measured_where_the_device_has_bfloat16(monkeypatch):
    config = benchmarks.StepConfig()
    for has, dtypes in ((True, [torch.bfloat16, torch.float32]), (False, [torch.float32])):
        monkeypatch.setattr(benchmarks, "has_bfloat16", lambda device, has=has: has)
        assert benchmarks.measured_dtypes(config, torch.device("cpu")) == dtypes


def test_calls_alternate_and_warmup_rounds_do_not_count(monkeypatch):
    """A clock that only the calls advance: 90 seconds each at first, then those below, whose medians are 2 and 5."""
    now, made = [0.0], list[str]()
    monkeypatch.setattr(benchmarks.time, "perf_counter", lambda: now[0])
    seconds = {"a": iter([90, 90, 1, 2, 9]), "b": iter([90, 90, 8, 4, 5])}

    def call(name: str) -> None:
        now[0] += next(seconds[name])
        made.append(name)

    calls = {"a": lambda: call("a"), "b": lambda: call("b")}
    assert benchmarks.time_alternately(calls, 3, torch.device("cpu")) == {"a": 2, "b": 5}
    assert made == ["a", "b"] * (3 + benchmarks.WARMUP_ROUNDS)


def test_a_training_step_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmarks, "PRODUCT_SIZE", {"cpu": 64})
    report = report_of(f"train {MODEL} --batch-size 2", tmp_path / "report.json")
    assert {row["step"] for row in report["rows"]} == {"plain", *(["fast"] if has_fast_rows(report) else [])}
    assert report["rows"][-1]["dtype"] == "float32"
    for row in report["rows"]:
        assert row["tokens/s"] > 0 and row["fraction"] == pytest.approx(row["tokens/s"] / row["upper bound"], rel=0.1)
    assert report["memory of a step, MB"] >= 0
    assert report["settings"] in capsys.readouterr().out


def test_plain_and_fast_steps_are_separate_models(accelerated, takes, tmp_path):
    takes({"": 1.0})
    report = report_of(f"train {MODEL} --batch-size 2", tmp_path / "report.json")
    dtypes = len(benchmarks.model_dtypes(torch.device("cpu")))
    assert [row["step"] for row in report["rows"]] == ["plain", "fast"] * dtypes
    assert len(accelerated) == dtypes and all(isinstance(model, Llama) for model in accelerated)


def test_generation_is_measured(tmp_path, capsys):
    report = report_of(f"generate {MODEL} --tokens 15 --samples 3", tmp_path / "report.json")
    found = {(row["model"], row["weights"], row["samples"]) for row in report["rows"]}
    assert found >= {("plain", "float32", 1), ("plain", "float32", 3)}
    for row in report["rows"]:
        assert row["tokens/s"] > 0 and row["fraction"] == pytest.approx(row["tokens/s"] / row["upper bound"], rel=0.1)
    assert report["settings"] in capsys.readouterr().out


def test_plain_and_fast_generation_are_separate_models(accelerated, tmp_path):
    report = report_of(f"generate {MODEL} --tokens 3 --samples 1", tmp_path / "report.json")
    dtypes = benchmarks.model_dtypes(torch.device("cpu"))
    assert [row["model"] for row in report["rows"]] == ["plain", "fast"] * len(dtypes)
    assert [model.lm_head.weight.dtype for model in accelerated] == dtypes


@pytest.mark.parametrize("command", bench.COMMANDS)
def test_help_describes_every_option(command, capsys):
    with pytest.raises(SystemExit) as exit:
        bench.parse([command, "--help"])
    assert exit.value.code == 0
    assert "--out FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("norms --rows 0", "--rows must be at least 1, not 0"),
        ("norms --dim -3", "--dim must be at least 1, not -3"),
        ("norms --dim 15", "--dim 15: groups of groupnorm must divide the 15 features"),
        ("norms --rounds 0", "--rounds must be at least 1, not 0"),
        ("generate --tokens 256", "--tokens 256 must be below --context 256"),
        ("generate --heads 5", "heads"),
        ("norms --rows many", "invalid int value: 'many'"),
        ("norms --device abacus", "--device 'abacus': choose auto, cpu, cuda, mps, or"),
        ("norms --out README.md/report.json", "README.md"),
        ("norms --out tests", "tests is a folder"),
        ("growth --plot tests", "tests is a folder"),
        ("norm", "invalid choice: 'norm'"),
        ("", "required"),
    ],
)
def test_bad_flags_end_with_2_and_one_line(flags, message, capsys):
    with pytest.raises(SystemExit) as exit:
        bench.main(flags.split())
    assert exit.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_only_files_are_replaced(monkeypatch, tmp_path, capsys):
    """Nothing is measured for a place that holds something else, nor for a link that leads to it or to nothing."""
    for name in ("norms", "growth"):
        monkeypatch.setitem(bench.COMMANDS, name, (lambda *_: pytest.fail("measured"), bench.COMMANDS[name][1]))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "dangling").symlink_to("nothing")
    for place in ("pipe", "link", "dangling"):
        for flags in ("norms --out", f"growth --out {tmp_path}/new --plot"):
            with pytest.raises(SystemExit) as exit:
                bench.main([*flags.split(), str(tmp_path / place)])
            assert exit.value.code == 2
            assert f"error: {tmp_path / place} is not a regular file" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 3
