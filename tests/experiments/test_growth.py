"""How cost grows: the prediction from the base shape, the plot, and a real measurement."""

import dataclasses

import pytest
import torch
from matplotlib.figure import Figure

import bench
from experiments import growth
from experiments.benchmarks import StepConfig
from experiments.growth import Cost, predict


def test_prediction_matches_the_base_and_scales_from_it():
    base = Cost("layers", 4, 1000.0, memory=300.0, flops_per_token=50.0, weight_bytes=100.0, activations=10.0)
    assert predict(base, base) == (1000.0, 300.0)
    double = dataclasses.replace(base, value=8, flops_per_token=100.0, weight_bytes=150.0, activations=20.0)
    assert predict(double, base) == (500.0, 150.0 + 2 * 200.0)


def test_the_cost_of_a_shape_by_hand(monkeypatch):
    """A step of 2 sequences of 16 tokens takes half a second. Weights, gradients and two moments are 4 bytes each."""
    memory = iter([1e6, 5e6])
    monkeypatch.setattr(growth, "peak_memory", lambda device: next(memory))
    monkeypatch.setattr(growth, "time_alternately", lambda calls, rounds, device: dict.fromkeys(calls, 0.5))
    shape = StepConfig(dim=32, layers=2, heads=2, hidden_dim=64, vocab_size=100, context=16, batch_size=2, device="cpu")
    matrices = 100 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64)
    assert growth.measure_cost("dim", 32, shape) == Cost(
        "dim",
        32,
        tokens_per_second=64.0,
        memory=4e6,
        flops_per_token=6 * matrices + 6 * 2 * 32 * 16,
        weight_bytes=4 * 4 * (matrices + 5 * 32),
        activations=2 * 16 * 2 * 32,
    )


def test_the_rows_and_the_plot_by_hand(monkeypatch, tmp_path):
    """The base has 256 features. Twice as many take half the speed, and activations twice their memory."""
    base = Cost("dim", 256, 1000.0, memory=300e6, flops_per_token=50.0, weight_bytes=100e6, activations=10.0)
    small = Cost("dim", 128, 1900.0, memory=160e6, flops_per_token=25.0, weight_bytes=50e6, activations=5.0)
    large = Cost("dim", 512, 450.0, memory=600e6, flops_per_token=100.0, weight_bytes=200e6, activations=20.0)
    deep = dataclasses.replace(base, axis="layers", value=4, tokens_per_second=1100.0)  # the base, measured again
    monkeypatch.setattr(growth, "AXES", {"dim": [128, 256, 512], "layers": [4]})
    monkeypatch.setattr(growth, "measure_costs", lambda shape: [small, base, large, deep])
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: drawn.append(figure))
    config = growth.GrowthConfig(plot=str(tmp_path / "plot.png"), device="cpu")
    rows = growth.bench_growth(config, torch.device("cpu"))["rows"]
    assert [list(row.values()) for row in rows] == [
        ["dim 128", 1900, 2000, 160, 150],
        ["dim 256", 1000, 1000, 300, 300],
        ["dim 512", 450, 500, 600, 600],
        ["layers 4", 1100, 1100, 300, 300],
    ]
    speed, _, memory, _ = drawn[0].axes
    lines = [[list(line.get_ydata()) for line in panel.lines] for panel in (speed, memory)]
    assert lines == [[[1900, 1000, 450], [2000, 1000, 500]], [[160, 300, 600], [150, 300, 600]]]
    assert list(speed.lines[0].get_xdata()) == [128, 256, 512]


@pytest.mark.slow
def test_growth_measures_every_shape(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(growth, "AXES", {"dim": [64, 256], "batch_size": [2, 16]})
    bench.main(f"growth --rounds 1 --device cpu --plot {tmp_path}/plot.png --out {tmp_path}/report.json".split())
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    for shape in ("dim 64", "dim 256", "batch_size 2", "batch_size 16"):
        assert shape in printed
