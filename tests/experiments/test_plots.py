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
from experiments.plots import COLORS, arm_styles, plot_curves, plot_differences
from experiments.records import Arm, Record
from experiments.report import figures_of
from pages.watch import plot_streams
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


def drawn(axes: Axes, marker: str) -> list[list[tuple[float, float]]]:
    """The points of all lines that have this marker, without empty ones."""
    lines = [np.asarray(line.get_xydata()).tolist() for line in axes.lines if line.get_marker() == marker]
    return [[(x, y) for x, y in line] for line in lines if line]


def test_differences_show_seeds_mean_interval_and_n_and_are_filled_if_they_are_shown():
    """By hand: -0.5, -0.4, -0.6 have mean -0.5 and standard deviation 0.1. The lowest difference comes first."""
    base, layernorm = runs("rmsnorm", 2.0, 3.0, 4.0), runs("layernorm", 1.5, 2.6, 3.4)
    axes = differences([*base, *runs("dyt", 2.4, 2.9, 4.1), *layernorm]).axes[0]
    seeds, average = drawn(axes, "^")
    assert [x for x, _ in seeds] == pytest.approx([-0.5, -0.4, -0.6]) and average == [(pytest.approx(-0.5), 0)]
    interval = axes.collections[0]
    assert isinstance(interval, LineCollection)
    ((low, _), (high, _)) = interval.get_segments()[0]
    assert (low, high) == pytest.approx((-0.5 - T_TWO * 0.1 / 3**0.5, -0.5 + T_TWO * 0.1 / 3**0.5))
    assert [text.get_text().strip() for text in axes.texts] == ["n = 3"] * 2
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layernorm", "dyt"]
    means = [line for line in axes.lines if line.get_markersize() == 9]
    assert [line.get_markerfacecolor() == "none" for line in means] == [False, True]


def test_an_arm_with_a_diverged_run_says_so_and_has_no_mean():
    """Nor has any arm a mean where a run of the baseline diverged. There are no curves if no run has a loss."""
    base = runs("rmsnorm", 2.0, 3.0, 4.0)
    axes = differences([*base, *runs("layernorm", 1.5, None, 3.4), *runs("dyt", None, None, None)]).axes[0]
    assert [[x for x, _ in seeds] for seeds in drawn(axes, "s")] == [pytest.approx([-0.6, -0.5][::-1])]
    assert not axes.collections
    assert [text.get_text().strip() for text in axes.texts] == ["n = 2 of 3", "n = 0 of 3"]
    axes = differences([*runs("rmsnorm", 2.0, None), *runs("layernorm", 1.5, 2.5)]).axes[0]
    assert drawn(axes, "s") == [[(-0.5, 0)]] and not axes.collections
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
    assert drawn(train, "o") == [[(10, 10.0), (20, 9.0), (30, 8.0), (40, 7.0)]]
    assert drawn(train, "s") == [[(10, 10.0), (20, 9.0)]]  # the second norm
    assert drawn(train, "X") == [[(20, 9.0)]] and drawn(val, "X") == []
    assert len(curves([*runs("rmsnorm", 2.0, 2.1), *runs("layernorm", 2.5, 2.7)]).axes) == 1
    short = [replace(run, log=[{**row, "step": row["step"] // 10} for row in run.log]) for run in runs("rmsnorm", 2.0)]
    assert all(tick == int(tick) for tick in curves(short).axes[0].get_xticks())


def test_many_arms_with_long_names_overlap_nothing_and_leave_room_for_the_panels():
    norm, more = "layernorm:bias=false,eps=1e-6", {"optimizer": "adamw", "weight_decay": "0.1"}
    arms = [Arm.of(norm=norm, placement=f"mhc:streams={i}", **more) for i in range(24)]
    outcomes = [replace(run, arm=arm) for i, arm in enumerate(arms) for run in runs("x", 2.0 + 0.001 * i, 2.1)]
    row = {"step": 1, "site": "mlp", "stream_after": 0.5}
    watched = {arm.name: [row | {"block": block} for block in (1, 2)] for arm in arms}
    for figure in (differences(outcomes), curves(outcomes), plot_streams(watched, arm_styles(arms))):
        FigureCanvasAgg(figure).draw()
        panels = [axes.get_window_extent() for axes in figure.axes]
        assert all(panel.height > 1.5 * figure.dpi and panel.width > 1.5 * figure.dpi for panel in panels)
        drawn = [*panels, *(legend.get_window_extent() for legend in figure.legends)]
        drawn += [axes.xaxis.label.get_window_extent() for axes in figure.axes if axes.get_xlabel()]
        assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 for box in drawn)
        texts = (axis.get_ticklabels() for axis in (figure.axes[0].yaxis, figure.axes[-1].xaxis))
        for boxes in (drawn, *([text.get_window_extent() for text in labels] for labels in texts)):
            assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert all(tick == int(tick) for tick in figure.axes[0].get_xticks())


@pytest.mark.parametrize("norms, placements", [(3, 12), (13, 1)])
def test_a_norm_has_a_color_and_marker_and_a_placement_a_line(norms, placements):
    """No two arms look the same in black and white."""
    names = ["rmsnorm", "dyt", *(f"norm{i}" for i in range(norms - 2))]
    arms = [Arm.of(seed="1", norm=norm, placement=f"p{i}") for norm in names for i in range(placements)]
    styles = arm_styles(arms)
    looks = {(style["marker"], style["linestyle"], style["fillstyle"]) for style in styles.values()}
    assert len(looks) == len(arms)
    for arm in arms:
        _, (_, norm), (_, placement) = arm.factors
        assert styles[arm.name]["color"] == styles[f"seed=1 {norm} p0"]["color"]
        assert styles[arm.name]["linestyle"] == styles[f"seed=1 dyt {placement}"]["linestyle"]


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
