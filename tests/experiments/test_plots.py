"""The plots of a report, by the numbers that they draw. Warnings are errors here."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from experiments.findings import compare
from experiments.plots import COLORS, arm_styles, plot_curves, plot_differences, plot_watched
from experiments.records import Arm, Record
from experiments.report import figures_of
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


def differences(outcomes: list[Record]) -> Figure:
    found = compare(outcomes)
    return plot_differences(found.found, "title", arm_styles(found.arms))


def curves(outcomes: list[Record]) -> Figure:
    figure = plot_curves(outcomes, arm_styles([run.arm for run in outcomes]), "title")
    assert figure
    return figure


def points(axes: Axes, marker: str) -> list[list[tuple[float, float]]]:
    """The points of all lines that have this marker, without empty ones."""
    lines = [np.asarray(line.get_xydata()).tolist() for line in axes.lines if line.get_marker() == marker]
    return [[(x, y) for x, y in line] for line in lines if line]


def test_differences_show_seeds_mean_interval_and_n_and_are_filled_if_they_are_shown():
    """By hand: -0.5, -0.4, -0.6 have mean -0.5 and standard deviation 0.1. The lowest difference comes first.

    An arm has no mean if one of its runs diverged.
    """
    base, layernorm = runs("rmsnorm", 2.0, 3.0, 4.0), runs("layernorm", 1.5, 2.6, 3.4)
    axes = differences([*base, *runs("dyt", 2.4, 2.9, 4.1), *layernorm, *runs("derf", 2.5, None, 4.5)]).axes[0]
    seeds, mean = points(axes, "^")
    assert [x for x, _ in seeds] == pytest.approx([-0.5, -0.4, -0.6]) and mean == [(pytest.approx(-0.5), 0)]
    assert points(axes, "D") == [[(0.5, 2), (0.5, 2)]]
    interval = axes.collections[0]
    assert isinstance(interval, LineCollection)
    ((low, _), (high, _)) = interval.get_segments()[0]
    assert (low, high) == pytest.approx((-0.5 - T_TWO * 0.1 / 3**0.5, -0.5 + T_TWO * 0.1 / 3**0.5))
    assert [text.get_text().strip() for text in axes.texts] == ["n = 3", "n = 3", "n = 2 of 3"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layernorm", "dyt", "derf"]
    means = [line for line in axes.lines if line.get_markersize() == 9]
    assert [line.get_markerfacecolor() == "none" for line in means] == [False, True]
    nothing = [*runs("rmsnorm", None, losses=()), *runs("layernorm", None, losses=())]
    FigureCanvasAgg(differences(nothing)).draw()
    assert not figures_of(compare(nothing))


def test_curves_are_means_over_the_steps_that_all_runs_logged():
    outcomes = [*runs("rmsnorm", 2.0, 2.5), *runs("layernorm", 2.0, None)]
    for run in outcomes[:3]:
        run.log.insert(1, {"step": 10, "val_bpb": 3.0})
    outcomes[3].log[2:] = [{"step": 25, "not_finite": True}]
    train, val = curves(outcomes).axes[:2]
    assert train.get_legend_handles_labels()[1] == ["rmsnorm", "layernorm (diverged)"]
    assert points(train, "o") == [[(10, 10.0), (20, 9.0), (30, 8.0), (40, 7.0)]]
    assert points(train, "s") == [[(10, 10.0), (20, 9.0)]]  # the second norm
    assert points(train, "X") == [[(20, 9.0)]] and points(val, "X") == []
    assert len(curves([*runs("rmsnorm", 2.0, 2.1), *runs("layernorm", 2.5, 2.7)]).axes) == 1


def test_many_arms_with_long_names_overlap_nothing_and_leave_room_for_the_panels():
    norm, more = "layernorm:bias=false,eps=1e-6", {"optimizer": "adamw", "weight_decay": "0.1"}
    arms = [Arm.of(norm=norm, placement=f"mhc:streams={i}", **more) for i in range(24)]
    outcomes = [replace(run, arm=arm) for i, arm in enumerate(arms) for run in runs("x", 2.0 + 0.001 * i, 2.1)]
    row = {"step": 1, "site": "mlp", "stream_after": 0.5}
    watched = {arm.name: [row | {"block": block} for block in (1, 2)] for arm in arms}
    for figure in (differences(outcomes), curves(outcomes), plot_watched(watched, arm_styles(arms))):
        FigureCanvasAgg(figure).draw()
        panels = [axes.get_window_extent() for axes in figure.axes]
        assert all(panel.height > 1.5 * figure.dpi and panel.width > 1.5 * figure.dpi for panel in panels)
        boxes = [*panels, *(legend.get_window_extent() for legend in figure.legends)]
        boxes += [axes.xaxis.label.get_window_extent() for axes in figure.axes if axes.get_xlabel()]
        assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
        texts = (axis.get_ticklabels() for axis in (figure.axes[0].yaxis, figure.axes[-1].xaxis))
        for group in (boxes, *([text.get_window_extent() for text in labels] for labels in texts)):
            assert not any(one.overlaps(other) for one, other in combinations(group, 2))
    assert all(tick == int(tick) for tick in figure.axes[0].get_xticks())


def test_no_two_arms_look_the_same_in_black_and_white():
    """A norm has a color, and a placement a line."""
    arms = [Arm.of(norm=f"n{i}", placement=f"p{j}") for i in range(11) for j in range(12)]
    styles = arm_styles(arms)
    assert styles["n2 p0"]["color"] == styles["n2 p9"]["color"] != styles["n3 p0"]["color"]
    assert styles["n0 p2"]["linestyle"] == styles["n9 p2"]["linestyle"] != styles["n0 p3"]["linestyle"]
    assert len({(each["marker"], each["linestyle"], each["fillstyle"]) for each in styles.values()}) == len(arms)


def test_every_color_has_contrast_on_white_and_inverted_as_in_dark_mode():
    """At least 3 : 1, by the W3C's formulas of contrast and of the filters invert(0.93) and hue-rotate(180deg)."""
    turn = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])

    def luminance(color: np.ndarray) -> float:
        return float(
            [0.2126, 0.7152, 0.0722] @ np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
        )

    for color in map(np.array, map(to_rgb, COLORS)):
        shown, ground = (luminance(np.clip(turn @ (0.93 - 0.86 * each), 0, 1)) for each in (color, np.ones(3)))
        assert 1.05 / (luminance(color) + 0.05) >= 3 and (shown + 0.05) / (ground + 0.05) >= 3, color
