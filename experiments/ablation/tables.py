"""The tables of an ablation: what they show of means, differences, interactions, costs and learning rates."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from experiments.ablation.comparison import ArmResult, Finding, Interaction, Outcomes, cells_by_arm, ended
from experiments.ablation.costs import Cost, EqualCost
from experiments.ablation.formats import Table
from experiments.ablation.grid import Cell
from experiments.ablation.outcome import Arm, final_bpb

NONE = "–"
INCOMPLETE = "†"  # beside a statistic that does not rest on all seeds
EDGE = "(edge)"  # beside a learning rate that is the lowest or the highest an arm has tried


def arms_table(
    caption: str, results: Sequence[ArmResult], edges: Iterable[Arm] = (), margin: float | None = None
) -> Table:
    """A row per arm, the first of which is the baseline. `edges` are the arms whose learning rate ends their sweep."""
    baseline = results[0].arm
    titles = [factor.replace("_", " ") for factor, _ in baseline.factors]
    titles += ["lr", "val_bpb (n)", f"paired difference from {baseline.name} (n)", "p"]
    titles += [] if margin is None else [f"p of ±{margin:g}"]
    titles += ["diverged"]
    rows = []
    for result in results:
        rows.append(
            [
                *(level for _, level in result.arm.factors),
                f"{result.lr:g} {EDGE}" if result.arm in edges else f"{result.lr:g}",
                format_finding(result.bpb, ".4f"),
                format_finding(result.difference),
                format_p(result.difference.p if result.difference else None),
                *([] if margin is None else [format_p(result.difference.equivalence_p if result.difference else None)]),
                f"{result.diverged} of {result.ended}",
            ]
        )
    return Table(caption, titles, rows)


def interactions_table(caption: str, found: Sequence[Interaction]) -> Table:
    titles = ["both", "difference of differences (n)", "p"]
    rows = [[" × ".join(item.changes), format_finding(item.difference), format_p(item.difference.p)] for item in found]
    return Table(caption, titles, rows)


def costs_table(caption: str, found: Sequence[Cost], tokens: EqualCost | None, seconds: EqualCost | None) -> Table:
    """A row per arm. val_bpb at equal tokens only where the arms differ in their tokens."""
    columns = {"seconds": seconds}
    if len({cost.tokens for cost in found if cost.tokens is not None}) > 1:
        columns = {"tokens": tokens} | columns
    titles = ["arm", "parameters", "FLOPs/token", "tokens", "tokens/s", "seconds"]
    titles += [f"val_bpb at {format_number(equal.budget, 1)} {axis} (n)" for axis, equal in columns.items() if equal]
    rows = []
    for cost in found:
        row = [cost.arm.name, f"{cost.parameters:,}", f"{cost.flops_per_token:.3g}"]
        row += [format_number(cost.tokens), format_number(cost.tokens_per_second), format_number(cost.seconds, 1)]
        for equal in columns.values():
            if equal:
                row.append(format_finding(equal.bpb.get(cost.arm), ".4f"))
        rows.append(row)
    return Table(caption, titles, rows)


def lr_table(caption: str, cells: Iterable[Cell], outcomes: Outcomes, best: Mapping[Arm, float]) -> Table:
    """A row per arm and a column per learning rate: mean val_bpb. Bold is the best, marked if it ends the sweep."""
    cells = list(cells)
    lrs = sorted({cell.lr for cell in cells})
    edges = at_edge(cells, best)
    rows = []
    for arm, arm_cells in cells_by_arm(cells).items():
        row = [arm.name]
        for lr in lrs:
            text = sweep_text([cell for cell in arm_cells if cell.lr == lr], outcomes)
            if lr == best.get(arm):
                text = f"**{text}** {EDGE}" if arm in edges else f"**{text}**"
            row.append(text)
        rows.append(row)
    return Table(caption, ["arm", *(f"{lr:g}" for lr in lrs)], rows)


def sweep_text(cells: Sequence[Cell], outcomes: Outcomes) -> str:
    """`2.2500 (2)`, or what is missing from a mean over all of an arm's `cells` at a learning rate."""
    runs = ended(cells, outcomes)
    diverged = sum(run.diverged for run in runs)
    if not cells:
        return NONE
    if diverged or len(runs) < len(cells):
        return f"{diverged} of {len(cells)} diverged" if diverged else f"{len(runs)} of {len(cells)} ended"
    return f"{mean(final_bpb(runs).values()):.4f} ({len(runs)})"


def at_edge(cells: Iterable[Cell], best: Mapping[Arm, float]) -> set[Arm]:
    """The arms whose best learning rate is the lowest or the highest of those they have tried."""
    tried = {arm: {cell.lr for cell in arm_cells} for arm, arm_cells in cells_by_arm(cells).items()}
    return {arm for arm, lr in best.items() if lr in (min(tried[arm]), max(tried[arm]))}


def missing(cells: Sequence[Cell], outcomes: Outcomes) -> str:
    """A sentence that counts and names the runs that have not ended, or nothing."""
    absent = [cell for cell in cells if cell not in outcomes]
    arms_by_seeds: dict[str, list[str]] = {}
    for arm, arm_cells in cells_by_arm(absent).items():
        seeds = ", ".join(map(str, sorted({cell.seed for cell in arm_cells})))
        arms_by_seeds.setdefault(seeds, []).append(arm.name)
    everywhere = len(cells_by_arm(cells))
    names = [
        f"{'seeds' if ',' in seeds else 'seed'} {seeds} of {'all arms' if len(arms) == everywhere else ', '.join(arms)}"
        for seeds, arms in arms_by_seeds.items()
    ]
    ended = len(cells) - len(absent)
    return f"**Partial: {ended} of {len(cells)} runs have ended.** Missing: {'; '.join(names)}." if absent else ""


def aggregates(
    rates: str, results: Sequence[ArmResult], found: Sequence[Cost], seconds: EqualCost | None, edges: Iterable[Arm]
) -> list[dict[str, Any]]:
    """Rows of `table.csv`, with all digits. `rates` says which learning rates these are."""
    rows = []
    for result, cost in zip(results, found, strict=True):
        difference = result.difference
        row: dict[str, Any] = {"rates": rates, **dict(result.arm.factors), "lr": result.lr}
        row |= {"lr_at_edge": result.arm in edges, "seeds": result.bpb.planned}
        row |= {"ended": result.ended, "diverged": result.diverged}
        row |= columns("val_bpb", result.bpb) | columns("difference", difference)
        row |= {"p": difference and difference.p, "equivalence_p": difference and difference.equivalence_p}
        row |= columns("val_bpb_at_equal_seconds", seconds.bpb.get(result.arm) if seconds else None)
        row |= {name: getattr(cost, name) for name in ("parameters", "flops_per_token")}
        row |= {name: getattr(cost, name) for name in ("tokens", "tokens_per_second", "seconds")}
        rows.append(row)
    return rows


def interaction_rows(rates: str, found: Sequence[Interaction]) -> list[dict[str, Any]]:
    """Rows of `interactions.csv`, with all digits."""
    return [
        {"rates": rates, "baseline": item.baseline.name, "change": item.changes[0], "other_change": item.changes[1]}
        | columns("difference_of_differences", item.difference)
        | {"p": item.difference.p}
        for item in found
    ]


def columns(name: str, finding: Finding | None) -> dict[str, Any]:
    """The columns of a finding in a CSV file: its mean, the half-width of its interval, and its number of seeds."""
    found = finding.estimate if finding else None
    return {
        name: found and found.mean,
        f"{name}_half_width": found and found.half_width,
        f"{name}_n": finding and finding.n,
    }


def format_finding(finding: Finding | None, number: str = "+.4f") -> str:
    """`1.7642 ± 0.0031 (3)`, and `1.7642 ± 0.0031 (2 of 3)†` if it does not rest on all seeds; a dash for none."""
    if finding is None or finding.estimate is None:
        return NONE
    n = f"({finding.n})" if finding.complete else f"({finding.n} of {finding.planned}){INCOMPLETE}"
    return f"{finding.estimate:{number}} {n}"


def format_p(p: float | None) -> str:
    if p is None:
        return NONE
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def format_number(value: float | None, decimals: int = 0) -> str:
    return NONE if value is None else f"{value:,.{decimals}f}".removesuffix(".0")
