"""Studies of trained models: norms, their learning rates, and placements."""

import math
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import numpy as np

from experiments.studies.study import ABOVE, Effect, M, Protocol, Runs, S, Study, difference, losses, lowest, slope

LRS = {"muon": 0.016, "adamw": 0.005}  # the middle of the first rates of a search


def tuned(optimizer: str, data: str = "python", **factors: str) -> Runs:
    return Runs({"optimizer": optimizer, **factors}, LRS[optimizer], data=data)


def both(name: str, **factors: str) -> dict[str, Runs]:
    """An arm with Muon, and with AdamW."""
    return {name: tuned("muon", **factors), f"{name}, AdamW": tuned("adamw", **factors)}


# --- norms -----------------------------------------------------------------------------------------------------------

SQUASHED = {"init": "xavier", "scaled_embedding": "true"}  # DyT and Derf do not rescale their input
RMSNORM = both("RMSNorm")
LAYERNORM = both("LayerNorm", norm="layernorm")
DYT = both("DyT", norm="dyt:alpha=0.5", **SQUASHED)
DYT_025 = both("DyT 0.25", norm="dyt:alpha=0.25", **SQUASHED)
DERF = both("Derf", norm="derf:alpha=0.5", **SQUASHED)
DERF_03 = both("Derf 0.3", norm="derf:alpha=0.3", **SQUASHED)
SHAKESPEARE = {
    "RMSNorm, Shakespeare": tuned("muon", "shakespeare"),
    "LayerNorm, Shakespeare": tuned("muon", "shakespeare", norm="layernorm"),
}

# DyT on these sizes of training text: 4,000 steps, which see 4.1 MB, at the best rates of 1,000 steps on all of it.
SIZES = {50_000: "50 kB", 200_000: "200 kB", 1_000_000: "1 MB", 4_100_000: "all"}
ENDS = {size: {f"DyT {end}": 1.0, f"LayerNorm {end}": -1.0} for size, end in SIZES.items()}
PAIR = {"DyT": {"norm": "dyt:alpha=2", **SQUASHED}, "LayerNorm": {"norm": "layernorm"}}
RATES = {f"{name} rate": tuned("adamw", **factors) for name, factors in PAIR.items()}
LONGER = {
    f"{name} {end}": Runs(
        {"optimizer": "adamw", "steps": "4000", **factors},
        like=f"{name} rate",
        data="python" if end == "all" else str(size),
    )
    for size, end in SIZES.items()
    for name, factors in PAIR.items()
}


def with_muon(arms: dict[str, Runs]) -> dict[str, Runs]:
    return {name: runs for name, runs in arms.items() if "AdamW" not in name}


def interaction(arm: str, **more: Any) -> Effect:
    terms = {arm: 1, "RMSNorm": -1, f"{arm}, AdamW": -1, "RMSNorm, AdamW": 1}
    return Effect(f"({arm} − RMSNorm) with Muon − with AdamW", terms, **more)


def qk_norm(number: int, *optimizers: str) -> dict[str, Runs]:
    """Arms at rates a factor of 2 apart, from a few below those of the other studies to more above them."""
    found = {}
    for optimizer in optimizers:
        lrs = tuple(float(f"{LRS[optimizer] * 2.0**power:.3g}") for power in range(1 - number // 2, 2 + number // 2))
        for name, kind in (("plain", "none"), ("QK-norm", "head")):
            found[f"{name}, {optimizer}"] = Runs({"optimizer": optimizer, "qk_norm": kind}, lrs=lrs)
    return found


def sensitivity(rows: list[dict], measured: dict) -> dict[str, float]:
    """How much is lost, on average over an arm's rates, to its best one. More than at the start is not lost."""
    capped = {arm: [min(loss, measured["initial"]) for loss in group] for arm, group in losses(rows).items()}
    return {arm: mean(group) - min(group) for arm, group in capped.items()}


# --- placements ------------------------------------------------------------------------------------------------------

STEPS = (1000, 250, 500, 2000, 4000)
MORE = (62, 125, 8000)  # pre-norm may need fewer or more steps for the loss of nGPT
NGPT = {"placement": "ngpt", "warmup": "0", "weight_decay": "0", "tie_embeddings": "false"}  # as its authors train it


def with_adam(placement: str, layers: str, scaled: str = "false") -> Runs:
    """With the Adam and the rate of the authors of LNS, without decay and clipping."""
    adam = {"optimizer": "adamw", "layers": layers, "warmup": "100", "weight_decay": "0", "clip": "0"}
    return Runs({**adam, "placement": placement, "depth_scaled_init": scaled}, lrs=(1e-3,))


def lns(layers: str) -> dict[str, Runs]:
    return {
        "pre": with_adam("pre", layers),
        "pre scaled": with_adam("pre", layers, "true"),
        "LNS": with_adam("lns", layers),
        "LNS scaled": with_adam("lns", layers, "true"),
    }


def ngpt() -> dict[str, Runs]:
    """Up to 1,000 steps, each number has its own best rate; longer runs have that of 1,000."""
    found = {}
    for steps, optimizer, (name, factors) in product(STEPS + MORE, LRS, (("pre", {}), ("nGPT", NGPT))):
        if steps in STEPS or name == "pre":
            lengths = dict.fromkeys(("steps", "eval_every", "save_every"), str(steps))
            runs = tuned(optimizer, **factors, **lengths)
            longer = Runs(runs.factors, like=f"{name} {optimizer} 1000")
            found[f"{name} {optimizer} {steps}"] = longer if steps > 1000 else runs
    return found


def growth(rows: list[dict], measured: dict) -> dict[str, float]:
    """ln(what a power law of the variance over depth leaves unexplained, over what an exponential leaves)."""
    found = {}
    for row in rows:
        found[row["arm"]] = math.inf
        if row["residual_rms"]:  # it did not diverge
            variances = 2 * np.log(row["residual_rms"][1:])
            depth = np.arange(1, len(variances) + 1)
            power, exponential = (np.polyfit(x, variances, 1, full=True)[1][0] for x in (np.log(depth), depth))
            found[row["arm"]] = float(np.log(power / exponential))
    return found


def speed_up(rows: list[dict], measured: dict) -> dict[str, float]:
    """ln(steps that pre-norm needs for the loss of nGPT after n steps, over n), by "optimizer n".

    The loss of pre-norm is linear in ln(steps) between its runs. Outside of them, the result is infinite.
    """
    ended, found = losses(rows), {}
    for arm, (loss,) in ended.items():
        placement, optimizer, steps = arm.split()
        if placement == "nGPT":
            pre = [other.split() for other in ended if other.startswith(f"pre {optimizer}")]
            known, needed = np.transpose(sorted((ended[" ".join(name)][0], math.log(int(name[2]))) for name in pre))
            at_loss = np.interp(loss, known, needed, left=math.inf, right=math.inf)
            found[f"{optimizer} {steps}"] = float(at_loss) - math.log(int(steps))
    return found


def over_steps(optimizer: str, **more: Any) -> Effect:
    points = {steps: {f"{optimizer} {steps}": 1.0} for steps in STEPS}
    return slope(f"slope of ln(speed-up) over ln(steps), {optimizer}", points, value="speed-up", **more)


STUDIES = [
    Study(
        "prenorm-variance",
        [
            Effect("pre-norm", {"pre": 1}, ABOVE, value="growth"),
            Effect("sandwich", {"sandwich": 1}, value="growth"),
        ],
        {"24 blocks": Protocol(5, S, {name: with_adam(name, "24") for name in ("pre", "sandwich")})},
        values={"growth": growth},
        unit="ln(residual of power law / of exponential)",
    ),
    Study(
        "rmsnorm-layernorm",
        [
            difference("RMSNorm", "LayerNorm", reproduced=(-math.inf, 0.02)),
            difference("RMSNorm, AdamW", "LayerNorm, AdamW"),
            difference("RMSNorm, Shakespeare", "LayerNorm, Shakespeare"),
        ],
        {
            "S": Protocol(12, S, RMSNORM | LAYERNORM | SHAKESPEARE),
            "M": Protocol(6, M, with_muon(RMSNORM | LAYERNORM)),
        },
    ),
    Study(
        "lns",
        [
            difference("LNS", "pre", reproduced=(-math.inf, 0.0), expected=(-math.inf, -0.018)),
            difference("LNS scaled", "pre scaled"),
            difference("pre scaled", "pre"),
            Effect("what scaled init takes from LNS", {"LNS scaled": 1, "pre scaled": -1, "LNS": -1, "pre": 1}),
        ],
        {"12 blocks": Protocol(12, S, lns("12")), "24 blocks": Protocol(4, S, lns("24"))},
    ),
    Study(
        "dyt-data",
        [
            slope("slope of DyT − LayerNorm over ln(bytes)", ENDS, reproduced=ABOVE),
            slope("the same at each run's best evaluation", ENDS, value="best evaluation"),
            *(difference(f"DyT {end}", f"LayerNorm {end}") for end in SIZES.values()),
        ],
        {"S": Protocol(4, f"{S} --eval-every 500", RATES | LONGER)},
        values={"best evaluation": partial(lowest, name="best")},
    ),
    Study(
        "dyt-fixed-compute",
        [
            difference("DyT 0.25", "RMSNorm", reproduced=(-0.02, math.inf)),
            difference("DyT", "RMSNorm"),
            difference("DyT 0.25, AdamW", "RMSNorm, AdamW"),
            difference("DyT, AdamW", "RMSNorm, AdamW"),
        ],
        {"S": Protocol(10, S, RMSNORM | DYT | DYT_025), "M": Protocol(6, M, with_muon(RMSNORM | DYT_025))},
    ),
    Study(
        "derf-muon",
        [
            interaction("Derf", reproduced=ABOVE, expected=(0.33, math.inf)),
            interaction("Derf 0.3"),
            difference("Derf", "RMSNorm"),
            difference("Derf, AdamW", "RMSNorm, AdamW"),
        ],
        {"S": Protocol(10, S, RMSNORM | DERF | DERF_03), "M": Protocol(5, M, RMSNORM | DERF)},
    ),
    Study(
        "ngpt-steps",
        [
            over_steps("muon", reproduced=ABOVE),
            over_steps("adamw"),
            *(
                Effect(f"speed-up after {steps} steps, muon", {f"muon {steps}": 1}, value="speed-up", ratio=True)
                for steps in sorted(STEPS)
            ),
        ],
        {"S": Protocol(4, S, ngpt())},
        values={"speed-up": speed_up},
        unit="slope of ln(speed-up) over ln(steps)",
    ),
    Study(
        "qk-norm-rates",
        [
            difference("plain, muon", "QK-norm, muon", value="sensitivity", reproduced=ABOVE),
            difference("plain, adamw", "QK-norm, adamw", value="sensitivity"),
        ],
        {"S": Protocol(5, S, qk_norm(9, "muon", "adamw")), "M": Protocol(3, M, qk_norm(7, "muon"))},
        values={"sensitivity": sensitivity},
    ),
]
