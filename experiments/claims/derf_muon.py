"""Claim 18. Derf loses with Muon what it wins with AdamW."""

from matplotlib.figure import Figure

from experiments.claims.claim import Claim, Judgment, Measured, Protocol
from experiments.claims.figures import plot_differences
from experiments.claims.runs import CPU_LRS, CPU_RUN, GPU_LRS, GPU_RUN, NO_STATISTICS, Runs, make_runs, nats, paired
from experiments.claims.verdict import Comparison, all_of, left_open
from experiments.statistics import differences_of_differences, estimate

ALPHAS = (0.25, 1.0, 4.0, 16.0)
NORMS = ("rmsnorm", *(f"derf:alpha={alpha}" for alpha in ALPHAS))
ARMS = tuple(
    {"norm": norm, "placement": "pre"} | optimizer for optimizer in ({}, {"optimizer": "muon"}) for norm in NORMS
)


def split(measured: Measured) -> dict[tuple[str, str], Runs]:
    """The reported runs by kind of norm and by optimizer."""
    runs: dict[tuple[str, str], Runs] = {}
    for row in measured["runs"]:
        key = row["arm"]["norm"].partition(":")[0], row["arm"].get("optimizer", "adamw")
        runs.setdefault(key, Runs([])).rows.append(row)
    return runs


def judge(measured: Measured) -> Judgment:
    runs = split(measured)
    diverged = sum(found.diverged for found in runs.values())
    if diverged:
        return left_open(diverged)
    wins, with_muon = (paired(runs["derf", optimizer], runs["rmsnorm", optimizer]) for optimizer in ("adamw", "muon"))
    more = differences_of_differences(
        *(runs[norm, optimizer].losses() for optimizer in ("muon", "adamw") for norm in ("derf", "rmsnorm"))
    )
    ours = f"Derf minus RMSNorm {nats(estimate(wins))} with AdamW, {nats(estimate(with_muon))} with Muon"
    comparisons = [
        Comparison("Derf wins with AdamW", wins, "below"),
        Comparison("Derf loses with Muon", with_muon, "above"),
        Comparison("it loses more with Muon than with AdamW", more, "above"),
    ]
    return all_of(comparisons, ours)


def plot(measured: Measured) -> Figure:
    """With Derf minus RMSNorm for each optimizer."""
    runs = split(measured)
    arms = {key: found.rows[0]["arm"] for key, found in runs.items()}
    return plot_differences(measured, [(arms["derf", name], arms["rmsnorm", name]) for name in ("adamw", "muon")])


CLAIM = Claim(
    number=18,
    name="derf-muon",
    statement="Derf wins with AdamW and loses with Muon",
    source="arXiv 2604.01563",
    published="a penalty of 0.66 nats with Muon",
    rule="Losses paired by seed, each arm at its best learning rate and Derf at its best initial alpha. Three "
    "comparisons (Holm): Derf minus RMSNorm with AdamW, the same with Muon, and the second minus the first. Confirmed "
    "if the first is below 0 and the others above (p < 0.05), refuted if any is on the other side.",
    protocols={
        "cpu": Protocol(minutes=20, flags=f"{CPU_RUN} {NO_STATISTICS}", arms=ARMS, lrs=CPU_LRS, best_variant=True),
        "gpu": Protocol(minutes=600, flags=f"{GPU_RUN} {NO_STATISTICS}", arms=ARMS, lrs=GPU_LRS, best_variant=True),
    },
    measure=make_runs,
    judge=judge,
    plot=plot,
)
