"""Is DyT at most 0.02 nats better than RMSNorm?"""

import math

from experiments.studies.study import RMSNORM, SQUASHED, M, Protocol, S, Study, both, difference

DYT = both("DyT", norm="dyt:alpha=0.5", **SQUASHED)
DYT_025 = both("DyT 0.25", norm="dyt:alpha=0.25", **SQUASHED)
MUON = {"RMSNorm": RMSNORM["RMSNorm"], "DyT 0.25": DYT_025["DyT 0.25"]}

STUDY = Study(
    "dyt-fixed-compute",
    [
        difference("DyT 0.25", "RMSNorm", reproduced=(-0.02, math.inf)),
        difference("DyT", "RMSNorm"),
        difference("DyT 0.25, AdamW", "RMSNorm, AdamW"),
        difference("DyT, AdamW", "RMSNorm, AdamW"),
    ],
    {"S": Protocol(10, S, RMSNORM | DYT | DYT_025), "M": Protocol(6, M, MUON)},
)
