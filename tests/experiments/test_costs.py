"""What arms cost, and steps that cost the same: by hand, with a clock that only the steps advance."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from config import configure
from experiments.costs import MOST_ROUNDS, PRECISE, ROUNDS, costs, equal_steps, interval, step_times
from experiments.records import Arm

LLAMA, GEMMA, WIDE = Arm.of(recipe="llama"), Arm.of(recipe="gemma3"), Arm.of(size="dim=32")  # one alone
SIZES = {"dim": 16, "layers": 1, "heads": 2, "context": 16, "tokenizer": "bytes", "device": "cpu", "compile": False}
SIZES |= {"dtype": "float32", "batch_size": 4, "steps": 100}
ARMS = {arm: configure(SIZES | {"recipe": arm.name}) for arm in (LLAMA, GEMMA)}


@pytest.fixture
def clock(monkeypatch):
    """`clock(noise)`: a step takes 1 second, and gemma3's 1.27. Returns the seconds of all steps that were taken."""

    def give(noise: float) -> list[float]:
        taken, draw = list[float](), np.random.default_rng(0)

        def make(model, config):
            middle = 1.27 if model == ARMS[GEMMA][0] else 1.0
            return lambda: taken.append(middle * (1 + noise * draw.uniform(-1, 1)))

        monkeypatch.setattr("experiments.costs.make_step", make)
        monkeypatch.setattr("experiments.benchmarks.time", SimpleNamespace(perf_counter=lambda: sum(taken)))
        return taken

    return give


def test_costs_by_hand():
    """A plain MLP has two matrices where SwiGLU has three, and a weight in a product has 6 FLOPs a token."""
    found, plain = costs(*ARMS[LLAMA]), costs(*configure(SIZES | {"mlp": "plain", "hidden_dim": 64}))
    assert found["tokens"] == 100 * 4 * 16 and found["parameters"] == 257 * 16 + 4 * 16**2 + 3 * 16 * 64 + 3 * 16
    assert found["flops"] - plain["flops"] == found["tokens"] * 6 * 16 * 64


def test_rounds_go_on_until_the_median_of_their_ratios_is_known(clock, monkeypatch):
    """Or a line says that the machine is busy."""
    for noise in (0.0, 0.2):
        taken = clock(noise)
        found = step_times(ARMS | {WIDE: ARMS[GEMMA]}, 3)
        assert torch.get_num_threads() == 1, "as before"
        assert found[LLAMA] == found[WIDE] == (1, 1, 1) and found[GEMMA][0] == pytest.approx(1.27, rel=PRECISE)
        assert len(taken) == 3 * (ROUNDS + 3) if noise == 0 else 3 * ROUNDS < len(taken) < 3 * MOST_ROUNDS
    clock(0.9)
    busy = r"^--equal time: this machine is busy: a step takes 1\.\d\d \([01]\.\d\d to 1\.\d\d\) times as long; try"
    with pytest.raises(ValueError, match=busy):
        step_times(ARMS, 1)
    clock(0)  # what is wider in steps of the first arm may be narrower in percent
    wide, close = (4.41, 4.31, 4.51), (1, 0.96, 1.05)
    monkeypatch.setattr("experiments.costs.interval", lambda each: wide if each[0] > 1 else close)
    with pytest.raises(ValueError, match=r"a step takes 1\.00 \(0\.96 to 1\.05\) times"):
        step_times(ARMS, 1)


def test_an_interval_covers_the_median_nineteen_times_in_twenty():
    draws = np.random.default_rng(0).exponential(size=(2000, 100))
    covered = [low <= np.log(2) <= high for _, low, high in map(interval, draws.tolist())]
    assert 0.93 < np.mean(covered) < 0.98
    assert interval([*range(100, 0, -1)]) == (50.5, 41, 60), "as many ranks below as above"


def test_steps_of_the_same_cost():
    """A warmup that was asked for goes with them. The rate does not, nor whether to compile."""
    assert equal_steps(ARMS, "tokens", {}) == {}
    base = {"steps": 100, "compile": False, "lr": ARMS[LLAMA][1].lr}
    assert equal_steps(ARMS, "time", {"llama": 1.0, "gemma3": 1.27}) == {LLAMA: base, GEMMA: base | {"steps": 79}}
    warm = {arm: configure(SIZES | {"recipe": arm.name, "warmup": 20}) for arm in ARMS}
    assert equal_steps(warm, "time", {"llama": 1.0, "gemma3": 0.5})[GEMMA] == base | {"steps": 200, "warmup": 40}
    wide = ARMS | dict.fromkeys((GEMMA, WIDE), configure(SIZES | {"hidden_dim": 128}))
    found = equal_steps(wide, "flops", {})  # a token has 50,784 FLOPs, or 69,216
    assert [each["steps"] for each in found.values()] == [100, 73, 100]
