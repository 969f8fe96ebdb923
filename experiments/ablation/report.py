"""The text of an ablation's report, in Markdown: what was run, and the tables."""

from collections.abc import Mapping, Sequence

from experiments.ablation.comparison import Finding, compare
from experiments.ablation.grid import Cell, Outcomes
from experiments.ablation.outcome import Arm, BySeed, final_bpb, grouped
from experiments.ablation.rates import POINTS, WINDOW, Optimum
from experiments.statistics import estimate

NONE = "–"
INCOMPLETE = "†"  # beside a statistic that does not rest on all seeds
HOW_TO_READ = (
    "A statistic is a mean over n seeds ± the half-width of its 95% interval (Student's t). Differences from the "
    "first row are paired: as far as their shapes allow, each seed gives both arms the same initial weights and "
    "batches. Below zero is better. p tests for no difference (paired t test). All p-values of this report are "
    "corrected together (Holm); each interval is for one comparison: an arm whose interval lies between -0.01 and "
    "0.01 is as good as the baseline, up to 0.01. `detectable` is about the smallest true difference that so many "
    "seeds show in four of five experiments, with the strictest correction; for two or three seeds it is too small, "
    "by up to a quarter. These statistics are about chance in seeds, not about other texts. A run diverged if its "
    "loss was not finite, or ended above that of a uniform prediction.",
    f"{INCOMPLETE} Some seeds are missing, because a run diverged or has not ended. The others may be the easy ones, "
    "so their mean is not comparable and has no p.",
)


def comparison_section(
    cells: Sequence[Cell], outcomes: Outcomes, optima: Mapping[Arm, Optimum] = {}
) -> tuple[dict[Arm, Finding], list[str]]:
    """What is found of the arms of the planned `cells`, each at one learning rate, and the text, first the conclusion.

    `optima` are given if learning rates were searched for.
    """
    lrs = {cell.arm: cell.lr for cell in cells}
    runs = {arm: [outcomes[cell] for cell in cells if cell in outcomes and cell.arm == arm] for arm in lrs}
    bpb = {arm: final_bpb(ended) for arm, ended in runs.items()}
    baseline = next(iter(bpb))
    seeds = grouped((cell.arm, cell.seed) for cell in cells)
    known = {arm: each.regret if each.holds(bpb[arm].values()) else None for arm, each in optima.items()}
    found = compare(bpb, seeds, known)
    rows = []
    for arm, ended in runs.items():
        levels = dict(arm.factors) | {"lr": f"{lrs[arm]:g}"}  # which may be a factor already
        difference = found.get(arm, Finding(None, 0))
        diverged = f"{sum(run.diverged for run in ended)} of {len(ended)}"
        rows.append([*levels.values(), mean_of(bpb[arm], len(seeds[arm])), *cells_of(difference), diverged])
    titles = [name.replace("_", " ") for name in levels]
    titles += ["val_bpb (n)", f"paired difference from {baseline.name} (n)", "detectable", "p", "diverged"]
    parts = [f"{arm.name} {finding}" for arm, finding in found.items()]
    each = f"all at learning rate {lrs[baseline]:g}" if len(set(lrs.values())) == 1 else "each at its own learning rate"
    pairs = sorted({finding.estimate.n for finding in found.values() if finding.estimate})
    about = f"In bits per byte (val_bpb), n = {' or '.join(map(str, pairs))}, {each}." if pairs else ""
    conclusion = f"Compared with {baseline.name}: {'; '.join(parts)}. {about}" if parts else ""
    return found, [conclusion, "## Comparison", missing(cells, outcomes), table(titles, rows)]


def cells_of(finding: Finding) -> list[str]:
    detectable = p = NONE
    if finding.complete and finding.estimate and finding.estimate.detectable is not None:
        detectable = f"{finding.estimate.detectable:.4f}"
    if finding.p is not None:
        p = f"{finding.p:.2g}" if finding.p >= 1e-4 else "< 0.0001"
    return [shown(finding), detectable, p]


def sweep_section(cells: Sequence[Cell], outcomes: Outcomes, optima: Mapping[Arm, Optimum]) -> list[str]:
    """A row per arm and a column per learning rate. `optima` is empty before all runs have ended."""
    lrs = sorted({cell.lr for cell in cells})
    rows = []
    for arm in dict.fromkeys(cell.arm for cell in cells):
        row = [arm.name]
        for lr in lrs:
            tried = [cell for cell in cells if (cell.arm, cell.lr) == (arm, lr)]
            bpb = final_bpb(outcomes[cell] for cell in tried if cell in outcomes)
            row.append(mean_of(bpb, len(tried)))
        best = regret = NONE
        if optima:
            best = f"{optima[arm].lr:g}"
            regret = "optimum not found" if optima[arm].regret is None else f"{optima[arm].regret:.4f}"
        rows.append([*row, best, regret])
    return [
        "## Learning rates",
        missing(cells, outcomes),
        "val_bpb on seeds that are not reported. An arm is reported at the vertex of a parabola through the losses "
        f"within {WINDOW:.3f} bits per byte (0.1 nats) of the lowest, of at least {POINTS} rates. The regret is what "
        "an error of the vertex is expected to cost: intervals are wider by it, and p-values count only what is "
        f"beyond. If fewer than {POINTS} rates are that close, or the vertex is not among them, no optimum is found. "
        "The arm is then reported at its best rate and has no p-value, because other arms may be closer to their "
        "optimum. The same holds if its reported seeds end, on average, further than that from the parabola.",
        table(["arm", *(f"{lr:g}" for lr in lrs), "reported at", "regret"], rows),
    ]


def missing(cells: Sequence[Cell], outcomes: Outcomes) -> str:
    ended = sum(cell in outcomes for cell in cells)
    return f"**Partial: {ended} of {len(cells)} runs have ended.**" if ended < len(cells) else ""


def mean_of(values: BySeed, planned: int) -> str:
    mean = estimate(list(values.values())) if values else None
    return shown(Finding(mean, planned), ".4f")


def shown(finding: Finding, number: str = "+.4f") -> str:
    """`1.7642 ± 0.0031 (3)`, or `1.7642 ± 0.0031 (2 of 3)†` if it does not rest on all seeds; a dash for none."""
    if finding.estimate is None:
        return NONE
    n = f"({finding.estimate.n})" if finding.complete else f"({finding.estimate.n} of {finding.planned}){INCOMPLETE}"
    return f"{finding.estimate:{number}} {n}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(line)} |" for line in (titles, *rows))
    return "\n".join([first, "|---" * len(titles) + "|", *others])
