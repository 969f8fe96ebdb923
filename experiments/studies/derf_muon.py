"""Is Derf further behind RMSNorm with Muon than with AdamW?"""

import math
from typing import Any

from experiments.studies.study import ABOVE, RMSNORM, SQUASHED, Effect, M, Protocol, S, Study, both, difference

DERF = both("Derf", norm="derf:alpha=0.5", **SQUASHED)
DERF_03 = both("Derf 0.3", norm="derf:alpha=0.3", **SQUASHED)


def interaction(arm: str, **more: Any) -> Effect:
    terms = {arm: 1, "RMSNorm": -1, f"{arm}, AdamW": -1, "RMSNorm, AdamW": 1}
    return Effect(f"({arm} − RMSNorm) with Muon − with AdamW", terms, **more)


STUDY = Study(
    "derf-muon",
    [
        interaction("Derf", reproduced=ABOVE, expected=(0.33, math.inf)),
        interaction("Derf 0.3"),
        difference("Derf", "RMSNorm"),
        difference("Derf, AdamW", "RMSNorm, AdamW"),
    ],
    {"S": Protocol(10, S, RMSNORM | DERF | DERF_03), "M": Protocol(5, M, RMSNORM | DERF)},
)
