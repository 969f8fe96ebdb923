"""Claim 16. The learned scale and shift matter little; the norm goes before the activation and before dropout."""

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.figures import draw_differences
from experiments.claims.runs import CPU_LRS, CPU_RUN, Runs, make_runs, nats, paired
from experiments.claims.verdict import ALPHA, left_open, p_above
from experiments.statistics import equivalence_p, estimate, holm
from norms.layernorm import LayerNorm

MARGIN = 0.02  # nats per token, and nats per example
ARMS = tuple({"norm": norm, "placement": "pre"} for norm in ("layernorm", "layernorm:elementwise_affine=false"))
INPUTS, HIDDEN, CLASSES, STEPS, BATCH = 16, 64, 8, 500, 64
ORDERS = ("norm, activation, dropout", "activation, norm, dropout", "activation, dropout, norm")


def mlp(order: str) -> nn.Sequential:
    """The MLP of article 001, wider, with its norm, activation and dropout in this order."""
    parts = {"norm": LayerNorm(HIDDEN), "activation": nn.ReLU(), "dropout": nn.Dropout(0.2)}
    middle = [parts[name] for name in order.split(", ")]
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), *middle, nn.Linear(HIDDEN, CLASSES))


def examples(count: int, teacher: nn.Module, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Normal inputs, and the class that a random network gives them."""
    inputs = torch.randn(count, INPUTS, generator=generator)
    return inputs, teacher(inputs).argmax(-1)


def mlp_loss(order: str, lr: float, seed: int) -> float:
    """Test loss in nats per example after training. Orders share the initial weights, the data and the batches."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).requires_grad_(False)
    model = mlp(order)
    generator = torch.Generator().manual_seed(seed)
    test_inputs, test_classes = examples(4096, teacher, generator)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for _ in range(STEPS):
        inputs, classes = examples(BATCH, teacher, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
    return F.cross_entropy(model.eval()(test_inputs), test_classes).item()


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """The runs of the model; and the losses of the MLP by order, each at its best learning rate on other seeds."""
    measured = make_runs(protocol, lab)
    lrs, seeds = protocol.settings["mlp_lrs"], range(protocol.settings["mlp_seeds"])
    orders = {}
    for order in ORDERS:
        losses = {lr: sum(mlp_loss(order, lr, 1000 + seed) for seed in range(3)) for lr in lrs}
        best = min(losses, key=lambda lr: losses[lr])
        orders[order] = [mlp_loss(order, best, seed) for seed in seeds]
    return measured | {"orders": orders}


def judge(measured: Measured) -> Judgment:
    runs = Runs(measured["runs"])
    if runs.diverged:
        return left_open(runs.diverged)
    with_affine, without = (runs.of(arm) for arm in ARMS)
    affine = paired(without, with_affine)
    usual, *others = (measured["orders"][order] for order in ORDERS)
    orders = [[mine - theirs for mine, theirs in zip(other, usual, strict=True)] for other in others]
    found, (swapped, last) = estimate(affine), map(estimate, orders)
    little, p_swapped, p_last = holm([equivalence_p(affine, MARGIN), swapped.p, last.p])
    assert little is not None and p_swapped is not None and p_last is not None
    ours = (
        f"without scale and shift {nats(found)}; in an MLP, the norm after the activation {swapped:+.4f}, and after "
        f"dropout {last:+.4f} (n = {swapped.n})"
    )
    better = [p for p, order in ((p_swapped, swapped), (p_last, last)) if p < ALPHA and order.mean < 0]
    p_all = max(little, p_swapped, p_last)
    p_matters = 2 * min(p_above(affine, MARGIN), p_above([-value for value in affine], MARGIN))
    if better:
        return Judgment(REFUTED, ours, "another order is better", min(better))
    if p_matters < ALPHA:
        return Judgment(REFUTED, ours, f"scale and shift change the loss by more than {MARGIN}", p_matters)
    if p_all < ALPHA:
        return Judgment(CONFIRMED, ours, "scale and shift matter little, other orders are worse", p_all)
    return Judgment(OPEN, ours, "not every part of the claim could be shown", p_all)


def plot(measured: Measured) -> Figure:
    """The model without scale and shift, and the MLP's test loss by order."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_differences(left, measured, [(ARMS[1], ARMS[0])])
    right.boxplot([measured["orders"][order] for order in ORDERS], orientation="horizontal")
    right.set_yticks(range(1, len(ORDERS) + 1), ORDERS)
    right.invert_yaxis()
    right.set_xlabel("test loss of the MLP (nats per example)")
    right.grid(axis="x", alpha=0.3)
    return figure


CLAIM = Claim(
    number=16,
    name="affine-and-order",
    statement="The learned scale and shift matter little, and the norm goes before the activation and before dropout",
    source="article 001",
    published="none",
    rule="LayerNorm in the language model, with scale and shift and without, paired by seed, each at its best learning "
    "rate. An MLP with the norm before the activation, after it, and after dropout, by 20 seeds, paired. Three tests "
    f"(Holm). Confirmed if the model's loss changes by less than {MARGIN} nats (TOST, p < 0.05) and both other orders "
    "of the MLP are worse; refuted if it changes by more, or if one of the other orders is better.",
    protocols={
        "cpu": Protocol(
            minutes=12, flags=CPU_RUN, arms=ARMS, lrs=CPU_LRS, seeds=8,
            settings={"mlp_lrs": [1e-3, 3e-3, 1e-2, 3e-2], "mlp_seeds": 20},
        )
    },
    measure=measure,
    judge=judge,
    plot=plot,
)  # fmt: skip
