"""The plots of an ablation, by the numbers that they draw. Warnings are errors here."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from experiments.ablation.grid import Cell
from experiments.ablation.outcome import Arm, Outcome
from experiments.ablation.plots import arm_styles, plot_curves, plot_differences
from experiments.ablation.report import comparison_section
from pages.watch import plot_streams

T_TWO = 4.302652729911275  # the 97.5% quantile of Student's t with 2 degrees of freedom, from tables
RMS, LAYER, DYT = (Arm.of(norm=norm, placement="pre") for norm in ("rmsnorm", "layernorm", "dyt"))


def runs(arm: Arm, *finals: float | None, losses: tuple = (5.0, 4.0, 3.0, 2.0)) -> list[Outcome]:
    """Runs with these losses at steps 10, 20, ..., plus 10 for each seed, and one evaluation. With None it diverged."""
    found = []
    for seed, final in enumerate(finals):
        log = [{"step": 10 * (i + 1), "train_loss": loss + 10 * seed} for i, loss in enumerate(losses)]
        step = 10 * len(losses)
        log.append({"step": step, "not_finite": True} if final is None else {"step": step, "val_bpb": final})
        found.append(Outcome(arm, 0.01, seed, final is None, step, final, final, final, None, None, log))
    return found


def differences(outcomes: list[Outcome]) -> Figure:
    cells = {Cell(run.arm, 0.01, run.seed): run for run in outcomes}
    found = comparison_section(list(cells), cells).found
    return plot_differences({arm.name: finding for arm, finding in found.items()}, "minus rmsnorm", "title")


def curves(outcomes: list[Outcome]) -> Figure:
    return plot_curves(outcomes, arm_styles([run.arm for run in outcomes]), "title", ["step"])


def drawn(axes: Axes, marker: str) -> list[list[tuple[float, float]]]:
    """The points of all lines that have this marker, without empty ones."""
    lines = [np.asarray(line.get_xydata()).tolist() for line in axes.lines if line.get_marker() == marker]
    return [[(x, y) for x, y in line] for line in lines if line]


def test_differences_show_seeds_mean_interval_and_n():
    """By hand: -0.5, -0.4, -0.6 have mean -0.5 and standard deviation 0.1."""
    axes = differences([*runs(RMS, 2.0, 3.0, 4.0), *runs(LAYER, 1.5, 2.6, 3.4)]).axes[0]
    seeds, average = drawn(axes, "o")
    assert [x for x, _ in seeds] == pytest.approx([-0.5, -0.4, -0.6]) and average == [(pytest.approx(-0.5), 0)]
    assert axes.get_xlabel() == "minus rmsnorm"
    (interval,) = axes.collections
    assert isinstance(interval, LineCollection)
    ((low, _), (high, _)) = interval.get_segments()[0]
    assert (low, high) == pytest.approx((-0.5 - T_TWO * 0.1 / 3**0.5, -0.5 + T_TWO * 0.1 / 3**0.5))
    assert [text.get_text().strip() for text in axes.texts] == ["n = 3"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layernorm pre"]


def test_an_arm_with_a_diverged_run_says_so_and_has_no_mean():
    """Nor has any arm a mean where a run of the baseline diverged."""
    outcomes = [*runs(RMS, 2.0, 3.0, 4.0), *runs(LAYER, 1.5, None, 3.4), *runs(DYT, None, None, None)]
    axes = differences(outcomes).axes[0]
    assert [[x for x, _ in seeds] for seeds in drawn(axes, "o")] == [pytest.approx([-0.5, -0.6])]
    assert not axes.collections
    assert [text.get_text().strip() for text in axes.texts] == ["n = 2 of 3", "n = 0 of 3"]
    axes = differences([*runs(RMS, 2.0, None), *runs(LAYER, 1.5, 2.5)]).axes[0]
    assert drawn(axes, "o") == [[(-0.5, 0)]] and not axes.collections
    for plot in (curves, differences):  # no run has a loss
        FigureCanvasAgg(plot([*runs(RMS, None, None), *runs(LAYER, None, None)])).draw()


def test_curves_are_means_over_the_steps_that_all_runs_logged():
    outcomes = [*runs(RMS, 2.0, 2.5), *runs(LAYER, 2.0, 2.5)]
    for run in outcomes[:3]:
        run.log.insert(1, {"step": 10, "val_bpb": 3.0})
    outcomes[3].log[2:] = [{"step": 25, "not_finite": True}]
    outcomes[3] = Outcome(LAYER, 0.01, 1, True, 25, None, None, None, None, None, outcomes[3].log)
    train, val = curves(outcomes).axes[:2]
    assert train.get_legend_handles_labels()[1] == ["rmsnorm pre", "layernorm pre (diverged)"]
    assert drawn(train, "o") == [[(10, 10.0), (20, 9.0), (30, 8.0), (40, 7.0)]]
    assert drawn(train, "s") == [[(10, 10.0), (20, 9.0)]]  # the second norm
    assert drawn(train, "X") == [[(20, 9.0)]] and drawn(val, "X") == []
    assert len(curves([*runs(RMS, 2.0, 2.1), *runs(LAYER, 2.5, 2.7)]).axes) == 1


def test_many_arms_with_long_names_overlap_nothing_and_leave_room_for_the_panels():
    norm, more = "layernorm:bias=false,eps=1e-6", {"optimizer": "adamw", "weight_decay": "0.1"}
    arms = [Arm.of(norm=norm, placement=f"mhc:streams={i}", **more) for i in range(24)]
    outcomes = [run for i, arm in enumerate(arms) for run in runs(arm, 2.0 + 0.001 * i, 2.1)]
    row = {"step": 1, "site": "mlp", "stream_after": 0.5}
    watched = {arm.name: [row | {"block": block} for block in (1, 2)] for arm in arms}
    for figure in (differences(outcomes), curves(outcomes), plot_streams(watched, arm_styles(arms))):
        FigureCanvasAgg(figure).draw()
        panels = [axes.get_window_extent() for axes in figure.axes]
        assert all(panel.height > 1.5 * figure.dpi and panel.width > 1.5 * figure.dpi for panel in panels)
        drawn = [*panels, *(legend.get_window_extent() for legend in figure.legends)]
        assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 for box in drawn)
        texts = (axis.get_ticklabels() for axis in (figure.axes[0].yaxis, figure.axes[-1].xaxis))
        for boxes in (drawn, *([text.get_window_extent() for text in labels] for labels in texts)):
            assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


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
