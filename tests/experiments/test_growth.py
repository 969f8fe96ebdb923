"""How cost grows: the prediction from the base shape, the plot, and a real measurement."""

import dataclasses

import pytest

import bench
from experiments import growth
from experiments.growth import Cost, predict


def test_prediction_matches_the_base_and_scales_from_it():
    base = Cost("layers", 4, 1000.0, memory=300.0, flops_per_token=50.0, weight_bytes=100.0, activations=10.0)
    assert predict(base, base) == (1000.0, 300.0)
    double = dataclasses.replace(base, value=8, flops_per_token=100.0, weight_bytes=150.0, activations=20.0)
    assert predict(double, base) == (500.0, 150.0 + 2 * 200.0)


@pytest.mark.slow
def test_growth_measures_every_shape(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(growth, "AXES", {"dim": [64, 256], "batch_size": [2, 16]})
    bench.main(f"growth --rounds 1 --device cpu --plot {tmp_path}/plot.png --out {tmp_path}/report.json".split())
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    for shape in ("dim 64", "dim 256", "batch_size 2", "batch_size 16"):
        assert shape in printed
