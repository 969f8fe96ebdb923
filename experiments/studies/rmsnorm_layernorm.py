"""Is RMSNorm worse than LayerNorm by less than 0.02 nats?"""

import math

from experiments.studies.study import RMSNORM, M, Protocol, S, Study, both, difference, tuned

LAYERNORM = both("LayerNorm", norm="layernorm")
SHAKESPEARE = {
    "RMSNorm, Shakespeare": tuned("muon", "shakespeare"),
    "LayerNorm, Shakespeare": tuned("muon", "shakespeare", norm="layernorm"),
}
MUON = {"RMSNorm": RMSNORM["RMSNorm"], "LayerNorm": LAYERNORM["LayerNorm"]}

STUDY = Study(
    "rmsnorm-layernorm",
    [
        difference("RMSNorm", "LayerNorm", reproduced=(-math.inf, 0.02)),
        difference("RMSNorm, AdamW", "LayerNorm, AdamW"),
        difference("RMSNorm, Shakespeare", "LayerNorm, Shakespeare"),
    ],
    {"S": Protocol(12, S, RMSNORM | LAYERNORM | SHAKESPEARE), "M": Protocol(6, M, MUON)},
)
