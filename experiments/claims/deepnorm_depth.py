"""Claim 5. Deep post-norm fails, DeepNorm trains."""

from matplotlib.figure import Figure

from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.runs import CLEARLY, Runs, learned, make_grid, make_runs, unigram_loss
from experiments.claims.verdict import ALPHA
from experiments.statistics import fisher_p

PLACEMENTS = ("post", "deepnorm")
RUN = (
    "--tokenizer bytes --dim 64 --heads 2 --context 64 --batch-size 8 --dtype float32 --optimizer adamw --steps 100 "
    "--init xavier --eval-every 100 --eval-tokens 16384 --save-every 100 --keep 1 --norm layernorm"
)
LRS = (3e-4, 1e-3, 3e-3)


def arms(depths: tuple[int, ...]) -> tuple[dict[str, str], ...]:
    return tuple({"placement": placement, "layers": str(depth)} for depth in depths for placement in PLACEMENTS)


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """The runs, and the loss of a model that knows the frequencies of the bytes only."""
    val = make_grid(protocol, lab).data.val.tokens
    return make_runs(protocol, lab) | {"unigram": unigram_loss(val)}


def failures(measured: Measured) -> dict[tuple[str, int], tuple[int, int]]:
    """By placement and depth: the failed runs, and all runs."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for row in measured["runs"]:
        arm = row["arm"]["placement"], int(row["arm"]["layers"])
        failed, total = found.get(arm, (0, 0))
        found[arm] = failed + (not learned(row, measured["unigram"])), total + 1
    return found


def judge(measured: Measured) -> Judgment:
    found = failures(measured)
    depths = sorted({depth for _, depth in found})
    shallowest, deepest = depths[0], depths[-1]
    (post, n), (deep, m) = (found[placement, deepest] for placement in PLACEMENTS)
    p = fisher_p(post, n, deep, m)
    ours = "failed runs, post-norm and DeepNorm: " + ", ".join(
        f"{found['post', depth][0]} and {found['deepnorm', depth][0]} of {n} with {depth} blocks" for depth in depths
    )
    if 2 * found["post", shallowest][0] > n:
        return Judgment(OPEN, ours, f"most runs of post-norm fail with {shallowest} blocks too", p)
    if p < ALPHA and post > deep:
        return Judgment(CONFIRMED, ours, f"with {deepest} blocks post-norm fails more often", p)
    if p < ALPHA:
        return Judgment(REFUTED, ours, f"with {deepest} blocks DeepNorm fails more often", p)
    if post == deep == 0:
        return Judgment(REFUTED, ours, f"post-norm trains with {deepest} blocks too", p)
    return Judgment(OPEN, ours, "too few failures to tell", p)


def plot(measured: Measured) -> Figure:
    """Final loss against the learning rate, by depth: of the runs that selected it hollow, of the reported ones filled.

    A cross at the top: diverged.
    """
    runs = Runs(measured["selection"] + measured["runs"])
    reported = {id(row) for row in measured["runs"]}
    depths = sorted({int(row["arm"]["layers"]) for row in runs.rows})
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, depth in zip(figure.subplots(1, len(depths), sharey=True), depths, strict=True):
        for number, placement in enumerate(PLACEMENTS):
            rows = runs.where(placement=placement, layers=str(depth)).rows
            done = [row for row in rows if not row["diverged"]]
            shift = 0.93 if number else 1.07
            for chosen in (False, True):
                shown = [row for row in done if (id(row) in reported) == chosen]
                axes.plot(
                    [row["lr"] * shift for row in shown], [row["val_loss"] for row in shown], "o", color=f"C{number}",
                    mfc=None if chosen else "none", label=placement if chosen else None,
                )  # fmt: skip
            lost = [row["lr"] * shift for row in rows if row["diverged"]]
            axes.plot(lost, [0.97] * len(lost), "x", color=f"C{number}", transform=axes.get_xaxis_transform())
        axes.axhline(measured["unigram"], color="0.5", linewidth=1, label="frequencies only")
        axes.set(xscale="log", xlabel="learning rate", title=f"{depth} blocks")
    figure.axes[0].set_ylabel("validation loss (nats per token)")
    figure.axes[-1].legend()
    return figure


CLAIM = Claim(
    number=5,
    name="deepnorm-depth",
    statement="Deep post-norm fails, DeepNorm trains",
    source="DeepNet, arXiv 2203.00555",
    published="1000 layers",
    rule=f"A run fails if it diverges, or does not end {CLEARLY} nats below the loss of a model that knows only "
    "the frequencies of the bytes. Each placement and depth at its best learning rate. Confirmed if at the largest "
    "depth post-norm fails more often than DeepNorm (Fisher's exact test, p < 0.05); refuted if less often, or if none "
    "fail; open if most runs of post-norm fail at the smallest depth too, because then depth is not the reason.",
    protocols={
        "cpu": Protocol(minutes=25, flags=RUN, arms=arms((4, 12, 24, 48)), lrs=LRS),
        "gpu": Protocol(
            minutes=120, flags=RUN.replace("--steps 100", "--steps 500"), arms=arms((4, 24, 48, 96)), lrs=LRS
        ),
    },
    measure=measure,
    judge=judge,
    plot=plot,
)  # fmt: skip
