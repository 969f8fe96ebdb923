"""Does the variance of pre-norm's stream grow over depth more like an exponential than like a power law?"""

import math

import numpy as np

from experiments.studies.lns import with_adam
from experiments.studies.study import ABOVE, Effect, Protocol, S, Study


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


STUDY = Study(
    "prenorm-variance",
    [
        Effect("pre-norm", {"pre": 1}, ABOVE, value="growth"),
        Effect("sandwich", {"sandwich": 1}, value="growth"),
    ],
    {"24 blocks": Protocol(5, S, {name: with_adam(name, "24") for name in ("pre", "sandwich")})},
    values={"growth": growth},
    unit="ln(residual of power law / of exponential)",
)
