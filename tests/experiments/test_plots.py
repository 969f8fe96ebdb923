"""The plots of a report, by the numbers that they draw. Warnings are errors here."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb

from experiments.findings import compare
from experiments.plots import COLORS, arm_styles, figures_of, plot_curves, plot_differences
from experiments.records import Arm, Record
from tests.experiments.made import records

T_TWO = 4.302652729911275  # the 97.5% quantile of Student's t with 2 degrees of freedom, from tables


def runs(norm: str, *finals: float | None, losses: tuple = (5.0, 4.0, 3.0, 2.0)) -> list[Record]:
    """Runs with these losses at steps 10, 20, ..., plus 10 for each seed, and one evaluation. With None it diverged."""
    found = []
    for run in records({norm: finals}):
        log = [{"step": 10 * (i + 1), "train_loss": loss + 10 * run.seed} for i, loss in enumerate(losses)]
        step = 10 * len(losses)
        log.append({"step": step, "not_finite": True} if run.diverged else {"step": step, "val_bpb": run.val_bpb})
        found.append(replace(run, log=log))
    return found


def test_differences_show_seeds_mean_and_interval():
    """By hand: -0.5, -0.4, -0.6 have mean -0.5 and standard deviation 0.1. The lowest difference comes first."""
    arms = [*runs("layernorm", 1.5, 2.6, 3.4), *runs("dyt", 1.5, 2.9, 4.2), *runs("derf", 2.5, None, 4.5)]
    found = compare([*runs("rmsnorm", 2.0, 3.0, 4.0), *arms])
    axes = plot_differences(found.found, "title", arm_styles(found.arms)).axes[0]
    lines = [line for line in axes.lines if line.get_marker() != "|"]
    seeds, mean, _, _, others, _ = (np.asarray(line.get_xydata()).tolist() for line in lines)
    assert [x for x, _ in seeds] == pytest.approx([-0.5, -0.4, -0.6]) and mean == [[pytest.approx(-0.5), 0]]
    assert others == [[0.5, 2], [0.5, 2]]  # without a mean, as a run diverged
    hollow = [line.get_markerfacecolor() == "none" for line in lines if line.get_markersize() == 9]
    assert hollow == [False, True]  # filled if the difference is shown
    interval = axes.collections[0]
    assert isinstance(interval, LineCollection)
    ((low, _), (high, _)) = interval.get_segments()[0]
    assert (low, high) == pytest.approx((-0.5 - T_TWO * 0.1 / 3**0.5, -0.5 + T_TWO * 0.1 / 3**0.5))
    assert [row.get_text() for row in axes.get_yticklabels()] == ["layernorm", "dyt", "derf"] and axes.yaxis_inverted()
    nothing = [*runs("rmsnorm", None, losses=()), *runs(r"$\frac{$", None, losses=())]
    for figure in figures_of(compare(nothing)).values():
        FigureCanvasAgg(figure).draw()


def test_curves_are_means_over_the_steps_that_all_runs_logged():
    outcomes = [*runs("rmsnorm", 2.0, 2.5), *runs("layernorm", 2.0, None)]
    outcomes[3].log[2:] = [{"step": 25, "not_finite": True}]
    train, val = plot_curves(outcomes, arm_styles(dict.fromkeys(run.arm for run in outcomes)), "title").axes
    assert train.get_legend_handles_labels()[1] == ["rmsnorm", "layernorm (diverged)"]
    first, second = (np.asarray(line.get_xydata()).tolist() for line in train.lines)
    assert first == [[10, 10.0], [20, 9.0], [30, 8.0], [40, 7.0]] and second == [[10, 10.0], [20, 9.0]]
    assert np.asarray(val.lines[0].get_xydata()).tolist() == [[40, 2.25]]


def test_no_two_arms_look_the_same_in_black_and_white():
    styles = arm_styles(Arm.of(norm=str(number)) for number in range(44))
    assert len({(each["marker"], each["linestyle"]) for each in styles.values()}) == 44


def test_every_color_has_contrast_on_white_and_inverted_as_in_dark_mode():
    """At least 3 : 1, by the W3C's formulas of contrast and of the filters invert(0.93) and hue-rotate(180deg)."""
    turn = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])

    def luminance(color: np.ndarray) -> float:
        linear = np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
        return float([0.2126, 0.7152, 0.0722] @ linear)

    for color in map(np.array, map(to_rgb, COLORS)):
        shown, ground = (luminance(np.clip(turn @ (0.93 - 0.86 * each), 0, 1)) for each in (color, np.ones(3)))
        assert 1.05 / (luminance(color) + 0.05) >= 3 and (shown + 0.05) / (ground + 0.05) >= 3, color
