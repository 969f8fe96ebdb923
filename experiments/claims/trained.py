"""Claims about trained models.

Scale S has 0.23 million parameters and sees 1.02 million tokens, M has 0.84 and sees 2.05 million. Tokens are bytes, so
losses are in nats per byte. Most claims are judged with Muon: between seeds, its losses vary less than AdamW's.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.claims.claim import Arm, Claim, Effect, Protocol, difference, slope

TINY = (
    "--tokenizer bytes --layers 4 --heads 2 --batch-size 8 --dtype float32 --no-compile --schedule linear --steps 1000 "
    "--eval-every 1000 --eval-tokens 131072 --save-every 1000 --keep 1"
)
S = f"{TINY} --dim 64 --context 128"
M = f"{TINY} --dim 128 --context 256"
# Of the scale "gpu", which runs only if asked for: 14 million parameters, 65 million tokens of 8,192 kinds.
GPU = "--preset small --dropout 0 --dtype bfloat16 --compile --steps 2000 --eval-every 2000 --save-every 2000 --keep 1"
LRS = {"muon": 0.016, "adamw": 0.005}  # where searches start
SQUASHED = {"init": "xavier", "scaled_embedding": "true"}  # for DyT and Derf, which do not rescale what they get
BELOW, ABOVE = (-math.inf, 0.0), (0.0, math.inf)


def tuned(optimizer: str, data: str = "python", **factors: str) -> Arm:
    return Arm({"optimizer": optimizer} | factors, LRS[optimizer], data=data)


def both(name: str, **factors: str) -> dict[str, Arm]:
    """An arm with Muon, and with AdamW."""
    return {name: tuned("muon", **factors), f"{name}, AdamW": tuned("adamw", **factors)}


RMSNORM, LAYERNORM = both("RMSNorm"), both("LayerNorm", norm="layernorm")
SHAKESPEARE = {
    "RMSNorm, Shakespeare": tuned("muon", data="shakespeare"),
    "LayerNorm, Shakespeare": tuned("muon", data="shakespeare", norm="layernorm"),
}
DYT = both("DyT", norm="dyt:alpha=0.5", **SQUASHED)
DYT_025 = both("DyT 0.25", norm="dyt:alpha=0.25", **SQUASHED)
DERF = both("Derf", norm="derf:alpha=0.5", **SQUASHED)
DERF_03 = both("Derf 0.3", norm="derf:alpha=0.3", **SQUASHED)


def interaction(arm: str, **more: Any) -> Effect:
    terms = {arm: 1, "RMSNorm": -1, f"{arm}, AdamW": -1, "RMSNorm, AdamW": 1}
    return Effect(f"({arm} − RMSNorm) with Muon − with AdamW", terms, **more)


WARMUPS = {
    f"{placement} {layers} {'without' if warmup == '0' else 'with'}": Arm(
        {"optimizer": "adamw", "placement": placement, "layers": layers, "warmup": warmup}, lrs=(3e-4, 1e-3, 3e-3)
    )
    for layers in ("6", "12")
    for warmup in ("0", "100")
    for placement in ("pre", "post")
}


def lns(layers: int) -> dict[str, Arm]:
    """With the authors' Adam. A name with "scaled" has depth-scaled initialization."""
    shared = {"optimizer": "adamw", "layers": str(layers), "warmup": "100", "weight_decay": "0", "clip": "0"}
    return {
        f"{name}{' scaled' if scaled == 'true' else ''}": Arm(
            shared | {"placement": placement, "depth_scaled_init": scaled}, lrs=(1e-3,)
        )
        for name, placement in (("pre", "pre"), ("LNS", "lns"))
        for scaled in ("false", "true")
    }


SANDWICH = Arm({**lns(24)["pre"].factors, "placement": "sandwich"}, lrs=(1e-3,))

SIZES = {50_000: "50 kB", 200_000: "200 kB", 1_000_000: "1 MB", 4_100_000: "all"}  # of text; 4,000 steps see the last
PAIR = {"DyT": {"norm": "dyt:alpha=2", **SQUASHED}, "LayerNorm": {"norm": "layernorm"}}


def amounts() -> dict[str, Arm]:
    """DyT and LayerNorm on parts of the text, for 4,000 steps at the best rates of 1,000 steps on all of it."""
    found = {f"{name} rate": tuned("adamw", **factors) for name, factors in PAIR.items()}
    for size, end in SIZES.items():
        for name, factors in PAIR.items():
            longer = {"optimizer": "adamw", "steps": "4000", **factors}
            data = "python" if end == "all" else str(size)
            found[f"{name} {end}"] = Arm(longer, like=f"{name} rate", data=data)
    return found


def amount_slope(name: str, value: str, **more: Any) -> Effect:
    ends = {math.log(size): {f"DyT {end}": 1.0, f"LayerNorm {end}": -1.0} for size, end in SIZES.items()}
    return slope(name, ends, value=value, **more)


STEPS = (1000, 250, 500, 2000, 4000)  # the rates of the first are those of longer runs as well
MORE = (62, 125, 8000)  # of pre-norm only, which may need fewer or more steps for the loss of nGPT


def lengths() -> dict[str, Arm]:
    """nGPT as its authors train it, without decay and warm-up, and with an output head of its own."""
    ngpt = {"placement": "ngpt", "warmup": "0", "weight_decay": "0", "tie_embeddings": "false"}
    found = {}
    for steps in (*STEPS, *MORE):
        shared = dict.fromkeys(("steps", "eval_every", "save_every"), str(steps))
        for optimizer in LRS:
            for name, factors in ((f"pre {optimizer}", {}), (f"nGPT {optimizer}", ngpt)):
                arm = tuned(optimizer, **factors, **shared)
                if steps in STEPS or not factors:
                    found[f"{name} {steps}"] = arm if steps <= 1000 else Arm(arm.factors, like=f"{name} 1000")
    return found


def speed_slope(optimizer: str, **more: Any) -> Effect:
    points = {math.log(steps): {f"{optimizer} {steps}": 1.0} for steps in STEPS}
    return slope(f"slope of ln(speed-up) over ln(steps), {optimizer}", points, value="speed-up", **more)


def rates(number: int, *optimizers: str) -> dict[str, Arm]:
    """Rates a factor of 2 apart, from a few below those of the other claims to more above them."""
    return {
        f"{'QK-norm' if qk == 'head' else 'plain'}, {optimizer}": Arm(
            {"optimizer": optimizer, "qk_norm": qk},
            lrs=tuple(float(f"{LRS[optimizer] * 2.0**power:.3g}") for power in range(1 - number // 2, 2 + number // 2)),
        )
        for optimizer in optimizers
        for qk in ("none", "head")
    }


def claim(name: str, effects: Sequence[Effect], protocols: dict[str, Protocol], **more: Any) -> Claim:
    """With the scale "gpu", which has the arms and seeds of the first scale."""
    first = next(iter(protocols.values()))
    return Claim(name, effects, protocols | {"gpu": replace(first, flags=GPU)}, **more)


CLAIMS = (
    claim(
        "rmsnorm-layernorm",
        effects=(
            difference("RMSNorm", "LayerNorm", reproduced=(-math.inf, 0.02)),
            difference("RMSNorm, AdamW", "LayerNorm, AdamW"),
            difference("RMSNorm, Shakespeare", "LayerNorm, Shakespeare"),
        ),
        protocols={
            "S": Protocol(12, S, RMSNORM | LAYERNORM | SHAKESPEARE),
            "M": Protocol(6, M, {"RMSNorm": tuned("muon"), "LayerNorm": tuned("muon", norm="layernorm")}),
        },
    ),
    claim(
        "prenorm-variance",
        effects=(
            Effect("pre-norm", {"pre": 1}, ABOVE, value="growth"),
            Effect("sandwich", {"sandwich": 1}, value="growth"),
        ),
        protocols={"24 blocks": Protocol(5, S, {"pre": lns(24)["pre"], "sandwich": SANDWICH})},
        across="ln(residual of power law / of exponential)",
    ),
    claim(
        "lns",
        effects=(
            difference("LNS", "pre", reproduced=BELOW, expected=(-math.inf, -0.018)),
            difference("LNS scaled", "pre scaled"),
            difference("pre scaled", "pre"),
            Effect("what scaled init takes from LNS", {"LNS scaled": 1, "pre scaled": -1, "LNS": -1, "pre": 1}),
        ),
        protocols={"12 blocks": Protocol(12, S, lns(12)), "24 blocks": Protocol(4, S, lns(24))},
        dashed=-0.037,
    ),
    claim(
        "dyt-data",
        effects=(
            amount_slope("slope of DyT − LayerNorm over ln(bytes)", "value", reproduced=ABOVE),
            amount_slope("the same at each run's best evaluation", "best evaluation"),
            *(difference(f"DyT {end}", f"LayerNorm {end}", x=size) for size, end in SIZES.items()),
        ),
        protocols={"S": Protocol(4, f"{S} --eval-every 500", amounts())},
        over="bytes of unique text",
        across="DyT − LayerNorm, nats",
    ),
    claim(
        "dyt-fixed-compute",
        effects=(
            difference("DyT 0.25", "RMSNorm", reproduced=(-0.02, math.inf)),
            difference("DyT", "RMSNorm"),
            difference("DyT 0.25, AdamW", "RMSNorm, AdamW"),
            difference("DyT, AdamW", "RMSNorm, AdamW"),
        ),
        protocols={
            "S": Protocol(10, S, RMSNORM | DYT | DYT_025),
            "M": Protocol(6, M, {"RMSNorm": tuned("muon"), "DyT 0.25": DYT_025["DyT 0.25"]}),
        },
    ),
    claim(
        "derf-muon",
        effects=(
            interaction("Derf", reproduced=ABOVE, expected=(0.33, math.inf)),
            interaction("Derf 0.3"),
            difference("Derf", "RMSNorm"),
            difference("Derf, AdamW", "RMSNorm, AdamW"),
        ),
        protocols={"S": Protocol(10, S, RMSNORM | DERF | DERF_03), "M": Protocol(5, M, RMSNORM | DERF)},
        dashed=0.66,
        across="interaction, nats",
    ),
    claim(
        "ngpt-steps",
        effects=(
            speed_slope("muon", reproduced=ABOVE),
            speed_slope("adamw"),
            *(
                Effect(
                    f"speed-up after {steps} steps, muon", {f"muon {steps}": 1}, value="speed-up", ratio=True, x=steps
                )
                for steps in sorted(STEPS)
            ),
        ),
        protocols={"S": Protocol(4, S, lengths())},
        over="steps",
        across="speed-up with Muon",
    ),
    claim(
        "qk-norm-rates",
        effects=(
            difference("plain, muon", "QK-norm, muon", value="sensitivity", reproduced=ABOVE),
            difference("plain, adamw", "QK-norm, adamw", value="sensitivity"),
        ),
        protocols={"S": Protocol(5, S, rates(9, "muon", "adamw")), "M": Protocol(3, M, rates(7, "muon"))},
    ),
)
