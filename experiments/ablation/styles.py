"""How an arm looks in all plots of an ablation: its color, line and marker."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from matplotlib import colormaps
from matplotlib.lines import Line2D

from experiments.ablation.outcome import Arm

ARMS_IN_A_PANEL = 4  # at most, where all arms share one panel
DIVERGED: dict[str, Any] = {
    "marker": "X",
    "markeredgecolor": "black",
    "linestyle": "none",
    "markersize": 8,
    "clip_on": False,
}


@dataclass(frozen=True)
class Style:
    color: Any
    line: Any
    marker: str
    line_marker: str  # on lines: none if all arms have the same


TAB20 = colormaps["tab20"].colors  # type: ignore[attr-defined]
CHOICES = {
    "color": [*TAB20[::2], *TAB20[1::2]],
    "line": ["-", "--", ":", "-.", (0, (8, 2)), (0, (1, 4)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2, 2, 2))],
    "marker": list("os^Dv<>ph*"),
}


class Styles:
    """The first factor that varies is the color, the second the line, all others together are the marker.

    With norms and placements, the color is the norm and the line the placement. Beyond 20 colors, 8 lines or 10 markers
    they repeat.
    """

    def __init__(self, arms: Iterable[Arm]):
        arms = list(arms)
        varying = [name for name, _ in arms[0].factors if len({arm[name] for arm in arms}) > 1]
        parts = dict(zip(CHOICES, (varying[:1], varying[1:2], varying[2:]), strict=True))
        self.values = {  # what each of color, line and marker stands for, by arm
            channel: {arm: Arm(tuple((name, arm[name]) for name in names)).name for arm in arms}
            for channel, names in parts.items()
        }

    def __getitem__(self, arm: Arm) -> Style:
        look = {channel: self._look(channel, values[arm]) for channel, values in self.values.items()}
        return Style(**look, line_marker=look["marker"] if any(self.values["marker"].values()) else "")

    def _look(self, channel: str, value: str) -> Any:
        choices = CHOICES[channel]
        return choices[list(dict.fromkeys(self.values[channel].values())).index(value) % len(choices)]

    def groups(self, arms: list[Arm]) -> list[list[Arm]]:
        """Which of `arms` to draw together: all if they are few, otherwise those of one color."""
        if len(arms) <= ARMS_IN_A_PANEL:
            return [arms]
        colors = self.values["color"]
        return [[arm for arm in arms if colors[arm] == color] for color in dict.fromkeys(colors[arm] for arm in arms)]

    def handles(self) -> list[Line2D]:
        """Legend entries: one per arm, or one per value of each factor if those are fewer."""
        arms = list(self.values["color"])
        by_value = [
            _handle(value, **{channel: self._look(channel, value)})
            for channel, values in self.values.items()
            for value in dict.fromkeys(values.values())
            if value
        ]
        if len(arms) > max(len(by_value), 1):
            return by_value
        return [_handle(arm.name, (look := self[arm]).color, look.line, look.line_marker) for arm in arms]


def _handle(label: str, color: Any = "0.3", line: Any = "-", marker: str = "") -> Line2D:
    return Line2D([], [], color=color, linestyle=line, marker=marker, label=label)
