"""The plots of an ablation, by the numbers that they draw. Warnings are errors here."""

from statistics import mean

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.text import Text

from experiments.ablation.outcome import Arm, Outcome
from experiments.ablation.plots import plot_curves, plot_depth, plot_differences, plot_paired_curves, plot_sweep
from experiments.ablation.styles import Styles
from experiments.probe import BlockStatistics

T_TWO = 4.302652729911275  # the 97.5% quantile of Student's t with 2 degrees of freedom, from tables


def arm_of(norm: str, placement: str = "pre", **factors: str) -> Arm:
    return Arm.of(norm=norm, placement=placement, **factors)


def run(
    arm: Arm, seed: int = 0, final: float | None = 2.0, *, lr: float = 0.01, losses: tuple = (5.0, 4.0, 3.0)
) -> Outcome:
    """A run with these training losses at steps 10, 20, ..., and one evaluation. With `final` None it diverged."""
    log = [{"step": 10 * (i + 1), "train_loss": loss} for i, loss in enumerate(losses)]
    step = 10 * len(losses)
    log.append({"step": step, "not_finite": True} if final is None else {"step": step, "val_bpb": final})
    return Outcome(arm, lr, seed, final is None, step, final, final, final, None, None, log)


def runs(arm: Arm, *finals: float | None, **fields) -> list[Outcome]:
    return [run(arm, seed, final, **fields) for seed, final in enumerate(finals)]


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def lines(axes: Axes, marker: str) -> list[list[tuple[float, float]]]:
    """The points of all lines that have this marker, without empty ones."""
    return [points(line) for line in axes.lines if line.get_marker() == marker and points(line)]


RMS, LAYER, DYT = arm_of("rmsnorm"), arm_of("layernorm"), arm_of("dyt")


# --- color, line, marker ---------------------------------------------------------------------------------------------


def test_color_is_the_norm_and_line_the_placement():
    arms = [arm_of(norm, place) for norm in ("rmsnorm", "layernorm", "dyt") for place in ("pre", "post")]
    styles = Styles(arms)
    for arm in arms:
        for other in arms:
            mine, theirs = styles[arm], styles[other]
            assert (to_hex(mine.color) == to_hex(theirs.color)) == (arm["norm"] == other["norm"])
            assert (mine.line == theirs.line) == (arm["placement"] == other["placement"])
            assert mine.marker == theirs.marker and mine.line_marker == ""
    assert [handle.get_label() for handle in styles.handles()] == ["rmsnorm", "layernorm", "dyt", "pre", "post"]


def test_without_a_second_norm_the_color_is_the_placement():
    arms = [arm_of("rmsnorm", place) for place in ("pre", "post")]
    styles = Styles(arms)
    assert styles[arms[0]].color != styles[arms[1]].color and styles[arms[0]].line == styles[arms[1]].line
    assert [handle.get_label() for handle in styles.handles()] == ["rmsnorm pre", "rmsnorm post"]


def test_other_factors_are_the_marker():
    arms = [
        arm_of(norm, place, optimizer=optimizer, layers=layers)
        for norm in ("rmsnorm", "dyt")
        for place in ("pre", "post")
        for optimizer in ("adamw", "muon")
        for layers in ("2", "4")
    ]
    styles = Styles(arms)
    assert len({(str(look.color), look.line, look.line_marker) for look in map(styles.__getitem__, arms)}) == 16
    assert [handle.get_label() for handle in styles.handles()][-2:] == [
        "optimizer=muon layers=2",
        "optimizer=muon layers=4",
    ]


def test_eighteen_arms_look_different_and_have_nine_legend_entries():
    arms = [arm_of(norm, place) for norm in "abcdef" for place in ("pre", "post", "sandwich")]
    styles = Styles(arms)
    assert len({(styles[arm].color, styles[arm].line) for arm in arms}) == 18
    assert len(styles.handles()) == 9
    assert [len(group) for group in styles.groups(arms)] == [3] * 6


# --- differences -----------------------------------------------------------------------------------------------------


def test_differences_show_seeds_mean_interval_and_n():
    """By hand: -0.5, -0.4, -0.6 have mean -0.5 and standard deviation 0.1."""
    axes = plot_differences([*runs(RMS, 2.0, 3.0, 4.0), *runs(LAYER, 1.5, 2.6, 3.4)], "title").axes[0]
    seeds, average = lines(axes, "o")
    assert [x for x, _ in seeds] == pytest.approx([-0.5, -0.4, -0.6])
    assert axes.get_xlabel() == "val_bpb minus that of rmsnorm pre, paired by seed (left is better)"
    heights = [y for _, y in seeds]
    assert len(set(heights)) == 3 and max(map(abs, heights)) < 0.5 and mean(heights) == pytest.approx(0)
    assert average == [(pytest.approx(-0.5), 0)]
    hollow = next(line for line in axes.lines if points(line) == average)
    assert hollow.get_markerfacecolor() == "none"
    (interval,) = axes.collections
    assert isinstance(interval, LineCollection)
    ((low, _), (high, _)) = interval.get_segments()[0]
    assert (low, high) == pytest.approx((-0.5 - T_TWO * 0.1 / 3**0.5, -0.5 + T_TWO * 0.1 / 3**0.5))
    assert [text.get_text().strip() for text in axes.texts] == ["n = 3"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layernorm pre"]


def test_an_arm_with_a_diverged_run_has_a_cross_and_no_mean():
    outcomes = [*runs(RMS, 2.0, 3.0, 4.0), *runs(LAYER, 1.5, None, 3.4), *runs(DYT, None, None, None)]
    axes = plot_differences(outcomes, "title").axes[0]
    assert [[x for x, _ in seeds] for seeds in lines(axes, "o")] == [pytest.approx([-0.5, -0.6])]
    assert not axes.collections
    assert lines(axes, "X") == [[(1, 0)], [(1, 1)]]
    notes = [text.get_text().strip() for text in axes.texts]
    assert notes == ["n = 2, 1 of 3 diverged", "n = 0, 3 of 3 diverged"]


def test_a_baseline_that_diverged_is_named():
    axes = plot_differences([*runs(RMS, 2.0, None), *runs(LAYER, 1.5, 2.5)], "title").axes[0]
    assert "1 of 2 runs of rmsnorm pre diverged" in axes.get_xlabel()
    assert [text.get_text().strip() for text in axes.texts] == ["n = 1"]
    assert lines(axes, "o") == [[(-0.5, 0)]] and not axes.collections  # no mean over the seed that is left


# --- curves ----------------------------------------------------------------------------------------------------------


def test_curves_are_means_over_the_steps_that_all_runs_logged():
    outcomes = [run(RMS, 0, losses=(5.0, 4.0, 3.0)), run(RMS, 1, final=None, losses=(6.0, 5.0))]
    train, val = plot_curves(outcomes, "title").axes
    assert lines(train, "") + lines(train, "None") == [[(10, 5.5), (20, 4.5)]]
    assert lines(train, "X") == [[(20, 4.5)]]
    assert lines(val, "X") == []


def test_paired_curves_subtract_the_same_seed():
    """By hand: at step 20 the differences are 1, 2, 3, with standard deviation 1, though the losses differ by 20."""
    baseline = [run(RMS, seed, losses=(9.0, 4.0 + 10 * seed, 3.0, 2.0)) for seed in range(3)]
    arm = [run(LAYER, seed, losses=(9.0, 5.0 + 11 * seed, 3.0, 2.0)) for seed in reversed(range(3))]
    train = plot_paired_curves([*baseline, *arm], "title").axes[0]
    curve = points(train.lines[0])
    assert curve == [(10, 0), (20, pytest.approx(2)), (30, 0), (40, 0)]
    band = np.asarray(train.collections[0].get_paths()[0].vertices)
    at_20 = sorted({float(value) for step, value in band if step == 20})
    assert at_20 == pytest.approx([2 - T_TWO / 3**0.5, 2 + T_TWO / 3**0.5])


def test_paired_curves_zoom_on_the_later_steps():
    losses = [(100.0, 3.0, 3.0, 3.0, 3.0), (1.0, 2.5, 2.5, 2.5, 2.5)]
    outcomes = [run(arm, losses=loss) for arm, loss in zip((RMS, LAYER), losses, strict=True)]
    low, high = plot_paired_curves(outcomes, "title").axes[0].get_ylim()
    assert -0.6 < low < -0.5 and 0 < high < 0.1


# --- learning rates --------------------------------------------------------------------------------------------------


def test_a_sweep_shows_runs_means_the_best_and_where_runs_diverge():
    outcomes = [
        *runs(RMS, 3.0, 3.5, lr=0.001),
        *runs(RMS, 2.0, 2.5, lr=0.003),
        *runs(RMS, None, 1.0, lr=0.01),
        *runs(RMS, None, None, lr=0.03),
    ]
    axes = plot_sweep(outcomes, "title").axes[0]
    means = points(axes.lines[0])
    assert means == [(0.001, 3.25), (0.003, 2.25)]
    dots, ring = lines(axes, "o")
    assert sorted(dots) == [(0.001, 3.0), (0.001, 3.5), (0.003, 2.0), (0.003, 2.5), (0.01, 1.0)]
    assert ring == [(0.003, 2.25)]
    top = axes.get_ylim()[1]
    assert lines(axes, "X") == [[(pytest.approx(0.01), top), (pytest.approx(0.03), top)]]
    assert points(axes.lines[-1]) == [(0.003, 2.25), (pytest.approx(0.01), top)]
    assert top > 3.5 and axes.get_xscale() == "log"


def test_crosses_at_one_rate_stand_side_by_side():
    outcomes = [outcome for arm in (RMS, LAYER) for lr in (0.01, 0.1) for outcome in runs(arm, None, lr=lr)]
    first, second = lines(plot_sweep(outcomes, "title").axes[0], "X")
    assert 0.01 < second[0][0] < 0.02 and 0.005 < first[0][0] < 0.01


def test_each_panel_of_a_large_sweep_has_one_norm_and_the_others_in_gray():
    arms = [arm_of(norm, place) for norm in ("rmsnorm", "layernorm", "dyt") for place in ("pre", "post")]
    outcomes = [outcome for lr in (0.01, 0.1) for arm in arms for outcome in runs(arm, 2.0 + lr, lr=lr)]
    panels = plot_sweep(outcomes, "title").axes
    for panel in panels:
        assert [line.get_color() for line in panel.lines].count("0.85") == 4
        assert len(lines(panel, "o")) == 4  # dots and ring, of two arms
    assert len(panels) == 3


# --- depth -----------------------------------------------------------------------------------------------------------


def test_depth_shows_means_at_the_start_above_those_at_the_end():
    def block(number: int, rms: float, gain: float | None) -> BlockStatistics:
        return BlockStatistics(number, rms, None, 1.0, gain, gain, gain)

    found = [
        (RMS, "start", block(0, 1.0, None)),
        (RMS, "start", block(1, 2.0, 1.0)),
        (RMS, "start", block(1, 4.0, 2.0)),  # another seed
        (RMS, "end", block(0, 5.0, None)),
        (LAYER, "start", block(0, 7.0, None)),
    ]
    figure = plot_depth(found, "title")
    rms, _, gain, rms_at_end, *_ = figure.axes
    assert [points(line) for line in rms.lines] == [[(0, 1.0), (1, 3.0)], [(0, 7.0)]]
    assert points(gain.lines[0]) == [(1, 1.5)]
    assert points(rms_at_end.lines[0]) == [(0, 5.0)] and points(rms_at_end.lines[1]) == []
    FigureCanvasAgg(figure).draw()


# --- drawing ---------------------------------------------------------------------------------------------------------

MANY = [arm_of(norm, place) for norm in "abcdef" for place in ("pre", "post", "sandwich")]
LAYOUTS = {
    "several seeds": [*runs(RMS, 2.0, 3.0, 4.0), *runs(LAYER, 1.5, 2.6, 3.4), *runs(DYT, None, 2.0, None)],
    "one run": runs(RMS, 2.0),
    "one run that diverged at once": [run(RMS, final=None, losses=())],
    "all diverged": [*runs(RMS, None, None), *runs(LAYER, None, None)],
    "many arms": [outcome for arm in MANY for outcome in runs(arm, 2.0, 2.1)],
}


@pytest.mark.parametrize(
    "plot, name",
    [(plot, name) for plot in (plot_curves, plot_sweep) for name in LAYOUTS]
    + [(plot, name) for plot in (plot_paired_curves, plot_differences) for name in LAYOUTS if "one run" not in name],
)
def test_any_outcomes_can_be_drawn_within_the_figure(plot, name):
    figure = plot(LAYOUTS[name], "1,066,112 parameters, 200 steps, each at its best learning rate, seeds 0 to 4")
    FigureCanvasAgg(figure).draw()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert box.x0 > -0.1 and box.y0 > -0.1 and box.x1 < width + 0.1 and box.y1 < height + 0.1
    (title,) = [text for text in figure.findobj(Text) if "1,066,112 parameters" in text.get_text()]
    assert not any(title.get_window_extent().overlaps(legend.get_window_extent()) for legend in figure.legends)
