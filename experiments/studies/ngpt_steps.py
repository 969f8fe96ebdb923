"""Does the speed-up of nGPT grow with the number of steps, from 250 to 4,000?

Up to 1,000 steps, each number has its own best rate; longer runs have that of 1,000.
"""

import math
from itertools import product
from typing import Any

import numpy as np

from experiments.studies.study import ABOVE, LRS, Effect, Protocol, Runs, S, Study, losses, slope, tuned

STEPS = (1000, 250, 500, 2000, 4000)
MORE = (62, 125, 8000)  # pre-norm may need fewer or more steps for the loss of nGPT
NGPT = {"placement": "ngpt", "warmup": "0", "weight_decay": "0", "tie_embeddings": "false"}  # as its authors train it


def arms() -> dict[str, Runs]:
    found = {}
    for steps, optimizer, (name, factors) in product(STEPS + MORE, LRS, (("pre", {}), ("nGPT", NGPT))):
        if steps in STEPS or name == "pre":
            lengths = dict.fromkeys(("steps", "eval_every", "save_every"), str(steps))
            runs = tuned(optimizer, **factors, **lengths)
            longer = Runs(runs.factors, like=f"{name} {optimizer} 1000")
            found[f"{name} {optimizer} {steps}"] = longer if steps > 1000 else runs
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
    points = {math.log(steps): {f"{optimizer} {steps}": 1.0} for steps in STEPS}
    return slope(f"slope of ln(speed-up) over ln(steps), {optimizer}", points, value="speed-up", **more)


STUDY = Study(
    "ngpt-steps",
    [
        over_steps("muon", reproduced=ABOVE),
        over_steps("adamw"),
        *(
            Effect(f"speed-up after {steps} steps, muon", {f"muon {steps}": 1}, value="speed-up", ratio=True)
            for steps in sorted(STEPS)
        ),
    ],
    {"S": Protocol(4, S, arms())},
    values={"speed-up": speed_up},
    unit="slope of ln(speed-up) over ln(steps)",
)
