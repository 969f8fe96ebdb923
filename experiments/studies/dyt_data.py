"""Does DyT − LayerNorm rise with the amount of unique text?

All runs have 4,000 steps, at the best rates of 1,000 steps on all of the text.
"""

import math
from functools import partial

from experiments.studies.study import ABOVE, SQUASHED, Protocol, Runs, S, Study, difference, lowest, slope, tuned

SIZES = {50_000: "50 kB", 200_000: "200 kB", 1_000_000: "1 MB", 4_100_000: "all"}  # 4,000 steps see 4.1 MB
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
ENDS = {math.log(size): {f"DyT {end}": 1.0, f"LayerNorm {end}": -1.0} for size, end in SIZES.items()}

STUDY = Study(
    "dyt-data",
    [
        slope("slope of DyT − LayerNorm over ln(bytes)", ENDS, reproduced=ABOVE),
        slope("the same at each run's best evaluation", ENDS, value="best evaluation"),
        *(difference(f"DyT {end}", f"LayerNorm {end}") for end in SIZES.values()),
    ],
    {"S": Protocol(4, f"{S} --eval-every 500", RATES | LONGER)},
    values={"best evaluation": partial(lowest, name="best")},
)
