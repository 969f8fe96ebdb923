"""The four tests of README.md beside this file, and the figure: `python judge.py`, with NumPy, SciPy and Matplotlib.

Nothing of the project is used, and nothing is read but runs.csv: rates and what their errors may cost are found again.
"""

import csv
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import optimize, stats

HERE = Path(__file__).parent
WIDTHS, ARMS = ("64", "96", "128"), ("llama", "qwen3", "gemma3")
MILLIONS = ("0.23", "0.47", "0.84")  # of parameters
STYLES = {"llama": ("C0", "o", "-"), "qwen3": ("#d86600", "s", "--"), "gemma3": ("C2", "^", ":")}


def width_and_recipe(row: dict[str, str]) -> tuple[str, str]:
    return row["size"].split(",")[0].removeprefix("dim="), row["recipe"]


def parabola(x: np.ndarray, low: float, vertex: float, curvature: float) -> np.ndarray:
    return low + curvature * (x - vertex) ** 2


def best_rate(search: dict[float, list[float]]) -> tuple[float, float]:
    """The vertex over the losses within 0.1 nats of the lowest, and the regret: what its error is expected to cost.

    That is the curvature times the variance of the vertex or, if more, what the lowest point of a cubic would save.
    """
    lowest = min(search, key=lambda rate: np.mean(search[rate]))
    close = {rate: each for rate, each in search.items() if np.mean(each) <= np.mean(search[lowest]) + 0.1 / np.log(2)}
    x, y = np.array([(np.log(rate), loss) for rate, each in close.items() for loss in each]).T
    (_, vertex, curvature), covariance = optimize.curve_fit(parabola, x, y, (y.min(), np.log(lowest), 0.1))
    cubic = np.polynomial.Polynomial.fit(x, y, 3)
    saved = cubic(vertex) - cubic(np.linspace(x.min(), x.max(), 1000)).min()
    return float(f"{np.exp(vertex):.3g}"), max(curvature * covariance[1, 1], saved)


by_seed: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
search: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
rates, regret = {}, {}
fastest: dict[tuple[str, str], float] = defaultdict(lambda: math.inf)  # seconds of training of an arm's fastest run
with open(HERE / "runs.csv") as file:
    for row in csv.DictReader(file):
        key = width_and_recipe(row)
        fastest[key] = min(fastest[key], float(row["seconds"]))
        if row["search"] == "True":
            search[key][float(row["lr"])].append(float(row["val_bpb"]))
        else:
            by_seed[key][int(row["seed"])] = float(row["val_bpb"])
            rates[key] = float(row["lr"])
for key, searched in search.items():
    rate, regret[key] = best_rate(searched)
    assert rate == rates[key], (key, rate, rates[key])
losses = {key: np.array([each[seed] for seed in sorted(each)]) for key, each in by_seed.items()}
quantile = stats.t.ppf(0.975, len(next(iter(losses.values()))) - 1)


def test(x: np.ndarray, slack: float) -> tuple[float, float, float]:
    """Mean, half-width and p of a t test, after `slack`, what errors of the rates may cost."""
    error = x.std(ddof=1) / np.sqrt(len(x))
    t = max(0.0, abs(x.mean()) - slack) / error
    return x.mean(), quantile * error + slack, 2 * stats.t.sf(t, len(x) - 1)


def difference(width: str, arm: str) -> tuple[np.ndarray, float]:
    """From llama, paired by seed, and what errors of both rates may cost."""
    return losses[width, arm] - losses[width, "llama"], regret[width, arm] + regret[width, "llama"]


tests = {}
for arm in ARMS[1:]:
    (small, small_slack), (large, large_slack) = difference("64", arm), difference("128", arm)
    tests[f"{arm} at 128"] = test(large, large_slack)
    tests[f"{arm} from 64 to 128"] = test(large - small, large_slack + small_slack)
    for width in WIDTHS:
        mean, half, p = test(*difference(width, arm))
        print(f"{arm} at {width}: {mean:+.4f} ± {half:.4f}, p = {p:.2g}, not corrected")
for key, each in losses.items():
    half = quantile * each.std(ddof=1) / np.sqrt(len(each))
    print(*key, f"{each.mean():.4f} ± {half:.4f}, rate {rates[key]}, regret {regret[key]:.4f}")
largest = 0.0
for rank, name in enumerate(sorted(tests, key=lambda name: tests[name][2])):
    mean, half, p = tests[name]
    largest = max(largest, min(1.0, (len(tests) - rank) * p))  # Holm
    print(f"{name}: {mean:+.4f} ± {half:.4f}, p = {largest:.2g}, within ±0.01: {abs(mean) + half <= 0.01}")

figure = Figure(figsize=(10, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
for number, arm in enumerate(ARMS):
    color, marker, line = STYLES[arm]
    style = {"color": color, "marker": marker, "linestyle": line, "capsize": 3, "label": arm, "markersize": 5}
    seconds = [fastest[width, "llama"] for width in WIDTHS]  # by plan equal for all arms
    shifted = np.array(seconds) * 1.03 ** (number - 1)  # so that no interval hides another
    means = [losses[width, arm].mean() for width in WIDTHS]
    halves = [quantile * losses[width, arm].std(ddof=1) / np.sqrt(len(losses[width, arm])) for width in WIDTHS]
    left.errorbar(shifted, means, halves, **style)
    if arm != "llama":
        mean, half, _ = np.array([test(*difference(width, arm)) for width in WIDTHS]).T
        right.errorbar(np.arange(3) + (number - 1.5) / 8, mean, half, **style)
left.set(xlabel="seconds of training on one thread, about", ylabel="validation bits per byte", xscale="log")
left.set_xticks(seconds, [f"{each:.0f}" for each in seconds])
left.minorticks_off()
left.set_title("means of five seeds, with 95% intervals", fontsize="small")
right.set_xlim(-0.3, 2.3)
right.axhline(0, color="C0", label="llama")
right.axhspan(-0.01, 0.01, color="0.9", label="as good, up to 0.01")
right.set_xticks(range(3), [f"width {width}\n{million}M" for width, million in zip(WIDTHS, MILLIONS, strict=True)])
right.set_xlabel("parameters")
right.set_ylabel("difference from llama at equal time\n← better          worse →")
for axes in (left, right):
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
figure.savefig(HERE / "equal-time.png", dpi=150)
