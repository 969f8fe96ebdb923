"""`ablate.py --ladder`: the sizes, and what their effects over compute show."""

import re

import numpy as np
import pytest
import scipy.stats

import ablate
from experiments.ablation.grid import Cell
from experiments.ablation.outcome import Arm, Outcome
from experiments.ablation.report import Comparison, by_verdict, compare, comparison_section
from experiments.ablation.run import climb, resolve_ablation
from model import Llama
from runtime.flags import read_train

PLAIN = [Arm.of(norm="rmsnorm"), Arm.of(norm="dyt:alpha=1")]
SIZES = ("dim=32,heads=2,steps=10", "dim=64,heads=4,steps=40", "dim=96,heads=6,steps=90")
FLOPS = dict(zip(SIZES, (1e9, 8e9, 1e11), strict=True))
ARMS = [Arm((("size", size), *arm.factors)) for size in SIZES for arm in PLAIN]
FLOPS_BY_ARM = {arm: FLOPS[arm.size] for arm in ARMS}
PLANNED = dict.fromkeys(ARMS, range(5))
LOSSES = np.random.default_rng(0).normal(0, 0.01, (6, 4))  # six arms, four seeds


def bpb_of(losses: np.ndarray) -> dict[Arm, dict[int, float]]:
    return {arm: dict(enumerate(map(float, row))) for arm, row in zip(ARMS, losses, strict=True)}


def test_a_size_has_heads_and_steps_for_its_width(text, capsys):
    shared = read_train(f"--data {text} --tokenizer bytes --layers 2 --head-dim 16 --batch-size 4 --context 8".split())
    arms = climb([64, 32], PLAIN, shared, 3.0)
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count(" parameters, 3 tokens for each")) == ("", 2)  # --print-commands has stdout
    assert [(arm.asked["dim"], arm.asked["heads"], arm.name.split()[1]) for arm in arms] == [
        (dim, dim // 16, arm.name) for dim in (32, 64) for arm in PLAIN
    ]
    for dim, (first, second) in zip((32, 64), (arms[:2], arms[2:]), strict=True):
        model = Llama(dim=dim, layers=2, heads=dim // 16, vocab_size=257)
        tokens = 3.0 * sum(weight.numel() for weight in model.parameters())
        assert first.asked["steps"] == second.asked["steps"] == round(tokens / (4 * 8))
    assert {"norm": "dyt", "norm_args": {"alpha": 1}}.items() <= arms[-1].asked.items()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("32 40 --head-dim 16", "--ladder 40 must be a multiple of the size of a head, 16; --head-dim sets it"),
        ("32 64 --heads 5", "--heads follows from --ladder; leave it out"),
        ("2048 4096 --preset 1b", "--ladder derives --hidden-dim from the width, and"),
        ("32 64 --factor steps=5,6", "--steps follows from --ladder; leave it out"),
        ("32 64 32", "--ladder needs two or more distinct positive widths"),
        ("32 64 --tokens-per-parameter 0", "--tokens-per-parameter must be positive, not 0.0"),
    ],
)
def test_other_sizes_are_refused(flags, message, text):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_ablation(*ablate.parse(f"--data {text} --tokenizer bytes --dtype float32 --ladder {flags}".split()))


def test_a_slope_is_that_of_each_seed_and_p_counts_all_comparisons():
    """Against numpy's line through the effects of each seed, scipy's test, and Holm's steps by hand."""
    losses = LOSSES.copy()
    losses[1::2] += np.array([0.02, 0.04, 0.08])[:, None]
    regrets = {ARMS[1]: 0.003, ARMS[5]: 0.001}
    pairs, trends = compare(bpb_of(losses), dict.fromkeys(ARMS, range(4)), regrets, FLOPS_BY_ARM)
    assert [pair for pair in pairs] == [(ARMS[1], ARMS[0]), (ARMS[3], ARMS[2]), (ARMS[5], ARMS[4])]
    x = np.log2([*FLOPS.values()])
    slopes = np.polyfit(x, losses[1::2] - losses[::2], 1)[0]
    (slope,) = trends.values()
    assert slope.values == pytest.approx(slopes) and [*trends] == [PLAIN[1]] and slope.estimate
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    cost = abs(weights[0]) * 0.003 + abs(weights[2]) * 0.001
    assert slope.estimate.high == pytest.approx(slopes.mean() + 3.18245 * scipy.stats.sem(slopes) + cost, rel=1e-5)
    differences = losses[1::2] - losses[::2]
    beyond = [*zip([*differences, slopes], (0.003, 0.0, 0.001, cost), strict=True)]
    p = [scipy.stats.t.sf(max(0, abs(v.mean()) - slack) / scipy.stats.sem(v), 3) * 2 for v, slack in beyond]
    ordered = np.maximum.accumulate([min(1.0, value * (4 - rank)) for rank, value in enumerate(sorted(p))])
    corrected = [ordered[sorted(p).index(value)] for value in p]
    assert max(corrected) < 1
    assert [each.p for each in (*pairs.values(), slope)] == pytest.approx(corrected)
    strictest = scipy.stats.t.isf([0.025 / 4, 0.2], 3).sum()
    detectable = [slack + strictest * scipy.stats.sem(v) for v, slack in beyond]
    assert [each.row["detectable"] for each in (*pairs.values(), slope)] == pytest.approx(detectable, rel=1e-5)


def section(losses: np.ndarray) -> Comparison:
    runs = {
        Cell(arm, 0.01, seed): Outcome(arm, 0.01, seed, False, 10, loss, loss, loss, 1.0, 1.0, [])
        for arm, row in zip(ARMS, losses, strict=True)
        for seed, loss in enumerate(map(float, row))
    }
    return comparison_section([*runs], runs, flops=FLOPS_BY_ARM)


@pytest.mark.parametrize(
    "effects, shown",
    [
        ((0.3, 0.2, 0.1), "the gap closes"),
        ((-0.1, -0.2, -0.3), "the gap grows"),
        ((0.2, 0.2, 0.2), "no trend shown"),
        ((0.3, 0.1, -0.2), "worse turns into better"),
        ((-0.2, 0.1, 0.3), "better turns into worse"),
        ((0.0, -0.02, -0.3), "the difference falls"),  # nothing is shown at the smallest size
    ],
)
def test_one_sentence_says_what_is_shown(effects, shown):
    losses = LOSSES.copy()
    losses[1::2] += np.array(effects)[:, None]
    found = section(losses)
    start = f"With compute, {shown} for dyt:alpha=1. Compared with rmsnorm of the same size: "
    assert found.text[0].startswith(start) and found.text[1] == "## Effect over compute" and shown in found.text[3]
    assert [slope.row["verdict"] for slope in found.trends.values()] == [shown]
    alone = section(losses[:, :1]).text[0]
    assert alone.startswith("With compute, no trend shown for dyt:alpha=1, as a single seed cannot tell a difference")
    if "grows" in shown:
        more = found.found | {Arm((arm.factors[0], ("norm", "x"))): each for arm, each in found.found.items()}
        assert by_verdict(more) == "dyt:alpha=1 (dim=32, dim=64, dim=96) and x (dim=32, dim=64, dim=96) are better"


def test_equal_arms_show_a_trend_in_at_most_six_of_a_hundred_ladders():
    generator, shown = np.random.default_rng(1), 0
    for _ in range(2000):
        (slope,) = compare(bpb_of(generator.normal(0, 0.01, (6, 5))), PLANNED, {}, FLOPS_BY_ARM)[1].values()
        shown += slope.p is not None and slope.p < 0.05
    assert shown <= 0.06 * 2000
