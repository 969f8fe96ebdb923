"""With plain initialization, is the loss of pre-norm lower with LNS?"""

import math

from experiments.studies.study import BELOW, Effect, Protocol, Runs, S, Study, difference


def with_adam(placement: str, layers: str, scaled: str = "false") -> Runs:
    """With the authors' Adam and its rate, without decay and clipping."""
    adam = {"optimizer": "adamw", "layers": layers, "warmup": "100", "weight_decay": "0", "clip": "0"}
    return Runs({**adam, "placement": placement, "depth_scaled_init": scaled}, lrs=(1e-3,))


def arms(layers: str) -> dict[str, Runs]:
    return {
        "pre": with_adam("pre", layers),
        "pre scaled": with_adam("pre", layers, "true"),
        "LNS": with_adam("lns", layers),
        "LNS scaled": with_adam("lns", layers, "true"),
    }


STUDY = Study(
    "lns",
    [
        difference("LNS", "pre", reproduced=BELOW, expected=(-math.inf, -0.018)),
        difference("LNS scaled", "pre scaled"),
        difference("pre scaled", "pre"),
        Effect("what scaled init takes from LNS", {"LNS scaled": 1, "pre scaled": -1, "LNS": -1, "pre": 1}),
    ],
    {"12 blocks": Protocol(12, S, arms("12")), "24 blocks": Protocol(4, S, arms("24"))},
)
