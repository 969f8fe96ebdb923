"""Claim 19. nGPT needs 4 to 20 times fewer steps."""

from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Claim, Judgment, Measured, Protocol
from experiments.claims.figures import plot_differences
from experiments.claims.runs import CPU_LRS, CPU_RUN, GPU_LRS, GPU_RUN, Runs, make_runs, nats, paired
from experiments.claims.verdict import ALPHA, left_open, p_above
from experiments.statistics import estimate, holm, noninferiority_p

MARGIN = 0.02  # nats per token


def arms(steps: int) -> tuple[dict[str, str], ...]:
    """Pre-norm with all of `steps`; nGPT, without warmup like its authors, with all, a half and a quarter of them."""
    shorter = ({"steps": str(steps // part), "save_every": str(steps // part)} for part in (2, 4))
    ngpt = {"norm": "rmsnorm", "placement": "ngpt", "warmup": "0"}
    return {"norm": "rmsnorm", "placement": "pre"}, ngpt, *(ngpt | less for less in shorter)


def judge(measured: Measured) -> Judgment:
    runs = Runs(measured["runs"])
    if runs.diverged:
        return left_open(runs.diverged)
    ngpt = runs.where(placement="ngpt")
    lengths = sorted({int(row["step"]) for row in ngpt.rows})
    differences = {length: paired(ngpt.where(step=length), runs.where(placement="pre")) for length in lengths}
    found = {length: estimate(values) for length, values in differences.items()}
    quarter = lengths[0]
    as_good = noninferiority_p(differences[quarter], MARGIN)
    p_worse, p_good = holm([p_above(differences[quarter], MARGIN), as_good])
    assert p_worse is not None and p_good is not None
    ours = "nGPT minus pre-norm: " + ", ".join(f"{nats(found[length])} with {length} steps" for length in lengths)
    if p_good < ALPHA:
        return Judgment(CONFIRMED, ours, f"a quarter of the steps is no worse, up to {MARGIN}", p_good)
    if p_worse < ALPHA:
        return Judgment(REFUTED, ours, f"a quarter of the steps is worse by more than {MARGIN}", p_worse)
    return Judgment(OPEN, ours, "a quarter of the steps may be as good", p_worse)


CLAIM = Claim(
    number=19,
    name="ngpt-steps",
    statement="nGPT needs 4 to 20 times fewer steps",
    source="nGPT, arXiv 2410.01131",
    published="4 to 20 times",
    rule="nGPT trained for a quarter of the steps minus pre-norm RMSNorm trained for all, paired by seed, each at its "
    "best learning rate and with a learning rate that decays to 0 (Holm over two tests). Confirmed if nGPT is worse "
    f"by less than {MARGIN} nats (one-sided, p < 0.05), refuted if worse by more.",
    protocols={
        "cpu": Protocol(minutes=20, flags=CPU_RUN, arms=arms(400), lrs=CPU_LRS),
        "gpu": Protocol(minutes=600, flags=GPU_RUN, arms=arms(2000), lrs=GPU_LRS),
    },
    measure=make_runs,
    judge=judge,
    plot=plot_differences,
)
