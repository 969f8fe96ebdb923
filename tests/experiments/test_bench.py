"""bench.py: every candidate is measured, and the printed report is the written one."""

import json
import os
import runpy
import subprocess
from collections.abc import Callable
from functools import partial

import pytest
import torch

import ablate
import bench
from config import configure
from experiments import benchmarks
from files import ROOT
from norms import KINDS
from runtime.flags import read_train
from runtime.run import resolve

MODEL = "--dim 32 --layers 2 --heads 2 --kv-heads 1 --head-dim 32 --attention-gate element --hidden-dim 64 "
MODEL += "--vocab-size 100 --context 16 --device cpu"
# The head, and in both blocks queries, output and gate, keys and values, MLP: 6 FLOPs for each weight. Attention has 2
# products over on average half of 16 tokens, with 2 FLOPs each, and as much again twice in backward.
MATRICES = 100 * 32 + 2 * (3 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 64)
FLOPS = 6 * MATRICES + 3 * 2 * (2 * 2 * 64 * 16 / 2)


def report_of(command: str, path) -> dict:
    bench.main([*command.split(), "--json", str(path)])
    return json.loads(path.read_text())


@pytest.fixture
def takes(monkeypatch) -> Callable:
    """`takes(seconds)` gives calls these seconds by a part of their names, and returns the calls that were timed."""
    timed: dict = {}

    def time_alternately(seconds, calls, *_):
        timed.update(calls)
        return {name: next(seconds[part] for part in seconds if part in name) for name in calls}

    def give(seconds: dict[str, float]) -> dict:
        monkeypatch.setattr(benchmarks, "time_alternately", partial(time_alternately, seconds))
        return timed

    return give


def test_shares_of_norms_by_hand(takes, tmp_path, capsys):
    """A copy of 64 × 64 numbers takes 2 µs. Forward moves as many bytes as a copy, forward and backward 2.5 times."""
    seconds = {"copy": 2e-6, "F.layer_norm forward": 3e-6, "F.layer_norm both": 5e-6, "forward": 4e-6, "both": 2e-5}
    timed = takes(seconds)
    report = report_of("norms --rows 64 --dim 64 --device cpu", tmp_path / "the new" / "report.json")
    assert report["command"].endswith(f" cpu --json '{tmp_path}/the new/report.json'")
    assert report["copy in float32, GB/s"] == pytest.approx(2 * 64 * 64 * 4 / 2e-6 / 1e9)
    assert report["copy in bfloat16, GB/s"] == pytest.approx(2 * 64 * 64 * 2 / 2e-6 / 1e9)
    rows = {row["norm"]: [row[name] for name in list(row)[2:]] for row in report["rows"] if row["dtype"] == "float32"}
    assert rows.keys() == KINDS.keys() - {"none"} | {"F.layer_norm", "F.rms_norm"}
    assert rows["dyt"] == pytest.approx([4e-3, 4 / 3, 2 / 4, 2e-2, 20 / 5, 2.5 * 2 / 20])
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("dyt "))
    assert printed.split() == ["dyt", "float32", *(f"{value:.3g}" for value in rows["dyt"])]
    assert [gradient.shape for gradient in timed["layernorm both"]()] == [(64, 64), (64,), (64,)]
    files = [str(bench.parse([name])[1]) for name in ("norms", "train", "generate")]
    assert files == ["runs/bench-norms.json", "runs/bench-train.json", "runs/bench-generate.json"]


def test_candidates_take_turns_and_the_first_two_rounds_do_not_count():
    clock = iter((9, 90, 8, 80, 1, 20, 3, 10, 2, 30))
    found = benchmarks.time_alternately({"a": print, "b": print}, 3, torch.device("cpu"), lambda *_: next(clock))
    assert found == {"a": 2, "b": 20} and not [*clock]


def test_shares_of_a_training_step_by_hand(takes, monkeypatch, tmp_path, capsys):
    """The product of two 10² matrices has 2000 FLOPs and takes 1 µs; the step of 2 sequences of 16 tokens half a s."""
    memory = iter([3e6, 10e6])
    monkeypatch.setattr(benchmarks, "peak_memory", lambda device: next(memory))
    monkeypatch.setattr(benchmarks, "PRODUCT_SIZE", {"cpu": 10})
    step = takes({"product": 1e-6, "step": 0.5})
    report = report_of(f"train {MODEL} --batch-size 4 --micro-batch-size 2 --norm dyt", tmp_path / "report.json")
    assert (step["step"].args[0].shape, torch.get_float32_matmul_precision()) == ((2, 16), "highest")
    bound = 2000 / 1e-6 / FLOPS
    (row,) = report["rows"]
    assert row == {"tokens/s": 64, "upper bound": round(bound), "fraction": pytest.approx(64 / bound), "memory, MB": 7}
    assert capsys.readouterr().out.split()[-4:] == ["64", str(round(bound)), f"{64 / bound:.3g}", "7"]


def test_shares_of_generation_by_hand(takes, monkeypatch, tmp_path):
    """15 tokens, as many as the context holds, of each of 3 samples in 2 s. Reading the weights takes 0.5 s / 15."""
    read = list[int]()
    monkeypatch.setattr(torch, "dot", lambda a, b: read.append(a.nbytes + b.nbytes))
    monkeypatch.setattr(benchmarks, "fast_decoder", lambda model, _, fast, compiled: (object() if fast else model, ""))
    timed = takes({"reading": 0.5 / 15, "plain": 2.0, "fast": 1.0})
    report = report_of(f"generate {MODEL} --dtype bfloat16 --tokens 99 --samples 3 --compile", tmp_path / "report.json")
    timed["reading"]()
    assert read == [pytest.approx(2 * MATRICES, rel=0.01)]
    with torch.autocast("cpu", torch.bfloat16):
        assert timed["plain", 3]().shape == (3, 16)
    rows = [tuple(row.values())[:4] for row in report["rows"]]  # --compile cannot be used, so it has none
    assert rows == [("plain", 1, 8, 30), ("plain", 3, 22, 90), ("fast", 1, 15, 30), ("fast", 3, 45, 90)]


def test_every_command_of_the_list_for_a_gpu_is_valid(tmp_path, text, monkeypatch):
    """The parsers and the checks of the commands accept it, and results/step.py runs. It ends in ten minutes."""
    script = ["bash", str(ROOT / "results/gpu.sh"), str(tmp_path / "the out"), str(text)]
    run = partial(subprocess.run, capture_output=True, text=True, env=os.environ | {"PYTHON": "true"})
    lines = run([*script, "all"]).stdout.splitlines()
    assert int(run(script).stderr.removesuffix(" s in total\n").split()[-1]) <= 560  # and 5 s to kill each
    monkeypatch.setattr("runtime.run.pick_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(bench, "pick_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr("machine.device.missing_for_compile", lambda device: "")
    small = f"{MODEL} --tokenizer bytes --vocab-size 257 --data {text} --cache-dir {tmp_path} --batch-size 2".split()
    assert len({line.partition(":")[0] for line in lines}) == 12 and str(text) in "".join(lines)
    for line in lines:
        program, *arguments = line.partition(" s: python ")[2].replace(" out/", "-out/").split()
        if program == "bench.py":
            bench.parse(arguments)
        elif program == "train.py":
            resolve(read_train([*arguments, "--no-compile"]))
        elif program == "results/step.py":
            main = runpy.run_path(str(ROOT / program))["main"]
            main.__globals__["STEPS"] = 2
            main(*arguments, *small)
            assert "aten::mm" in (tmp_path / f"the-out/step-{arguments[0]}.txt").read_text()
        elif program == "ablate.py":
            configure(ablate.parse(arguments)[1])
        else:
            assert program == "-m" and arguments[0] == "pytest"
