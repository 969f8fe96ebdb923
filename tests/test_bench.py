"""bench.py: every kind of norm is measured, what it prints is what it writes, and bad flags end in one line."""

import json
import statistics
from functools import partial

import pytest
import torch

import bench
from config import ModelConfig
from model import Llama
from norms import KINDS


def test_every_norm_is_measured_beside_torchs_own(tmp_path, capsys):
    out = tmp_path / "new" / "norms.json"
    bench.main(["norms", "--rows", "64", "--dim", "64", "--rounds", "3", "--device", "cpu", "--out", str(out)])
    report, printed = json.loads(out.read_text()), capsys.readouterr().out
    for dtype in ("float32", "bfloat16"):
        rows = {row["norm"]: row for row in report["rows"] if row["dtype"] == dtype}
        assert rows.keys() >= KINDS.keys() - {"none"} | {"F.layer_norm", "F.rms_norm"}
        assert rows["F.layer_norm"]["forward ratio"] == rows["F.layer_norm"]["both ratio"] == 1
        for name, row in rows.items():
            assert min(row["both ms"], row["forward ms"]) > 0
            assert row["forward ratio"] == pytest.approx(row["forward ms"] / rows["F.layer_norm"]["forward ms"])
            line = next(line for line in printed.splitlines() if line.startswith(f"{name} ") and dtype in line)
            assert line.split()[-6:] == [f"{value:.3g}" for value in list(row.values())[2:]]
        assert statistics.median(row["both ms"] / row["forward ms"] for row in rows.values()) > 1
        copy_ms = 1e3 * 2 * 64 * 64 * getattr(torch, dtype).itemsize / (1e9 * report[f"copy in {dtype}, GB/s"])
        assert rows["rmsnorm"]["forward share"] == pytest.approx(copy_ms / rows["rmsnorm"]["forward ms"])
    assert report["command"][:2] == ["bench.py", "norms"]
    assert report["norms on a CPU"] in printed


def test_calls_take_turns_and_the_first_rounds_do_not_count(monkeypatch):
    """A clock that stands still but for what the calls take: 9 seconds each at first, then 1 and 2."""
    now, made = [0.0], list[str]()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def call(name: str, seconds: float) -> None:
        now[0] += 9 if len(made) < 2 * bench.WARM_UP else seconds
        made.append(name)

    calls = {"a": lambda: call("a", 1), "b": lambda: call("b", 2)}
    assert bench.take_turns(calls, 3, torch.device("cpu")) == {"a": 1, "b": 2}
    assert made == ["a", "b"] * (3 + bench.WARM_UP)


def test_train_compares_the_same_step(tmp_path, capsys):
    out = tmp_path / "report.json"
    sizes = "--dim 32 --layers 2 --heads 2 --hidden-dim 64 --vocab-size 100 --context 16 --batch-size 2 --rounds 1"
    bench.main(f"train {sizes} --device cpu --out {out}".split())
    report = json.loads(out.read_text())
    assert [row["step"] for row in report["rows"][-2:]] == ["ours", "torch"]
    for row in report["rows"]:
        assert row["tokens/s"] > 0 and row["share"] == pytest.approx(row["tokens/s"] / row["ceiling"], rel=0.1)
    assert report["memory of a step, MB"] >= 0
    assert report["settings"] in capsys.readouterr().out


def test_generation_is_measured_in_every_format(tmp_path, capsys):
    out = tmp_path / "report.json"
    sizes = "--dim 32 --layers 2 --heads 2 --hidden-dim 64 --vocab-size 100 --context 16 --tokens 15 --samples 3"
    bench.main(f"generate {sizes} --rounds 1 --device cpu --out {out}".split())
    report = json.loads(out.read_text())
    assert {(row["weights"], row["samples"]) for row in report["rows"]} >= {("float32", 1), ("int8", 1), ("int8", 3)}
    for row in report["rows"]:
        assert row["tokens/s"] > 0 and row["share"] == pytest.approx(row["tokens/s"] / row["ceiling"], rel=0.1)
    assert report["one more token on a CPU"] in capsys.readouterr().out


def test_torchs_own_step_is_ours():
    """Loss and gradients, on the same weights: what is compared does the same work."""
    model = Llama(ModelConfig(dim=32, layers=2, heads=2, context=16, vocab_size=50))
    tokens = torch.arange(3 * 17).view(3, 17) % 50
    results = []
    for loss in (model.loss, partial(bench.torch_loss, model)):
        model.zero_grad()
        value = loss(tokens[:, :-1], tokens[:, 1:])
        value.backward()
        results.append([value.detach(), *(weight.grad for weight in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("norms --rows 0", "--rows must be at least 1, not 0"),
        ("norms --dim -3", "--dim must be at least 1, not -3"),
        ("norms --rounds 0", "--rounds must be at least 1, not 0"),
        ("generate --tokens 256", "--tokens 256 must be below --context 256"),
        ("generate --heads 5", "heads"),
        ("norms --rows many", "invalid int value: 'many'"),
        ("norms --device abacus", "invalid choice: 'abacus'"),
        ("norms --out README.md/report.json", "README.md"),
        ("norms --out tests", "tests is a folder"),
        ("growth --plot tests", "tests is a folder"),
        ("norm", "invalid choice: 'norm'"),
        ("", "required"),
    ],
)
def test_bad_flags_end_with_2_and_one_line(flags, complaint, capsys):
    with pytest.raises(SystemExit) as exit:
        bench.main(flags.split())
    assert exit.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and complaint in lines[0]
