"""Averaged over rates, is the loss closer to that of the best rate with QK-norm?"""

from statistics import mean

from experiments.studies.study import ABOVE, LRS, M, Protocol, Runs, S, Study, difference, losses


def arms(number: int, *optimizers: str) -> dict[str, Runs]:
    """At rates a factor of 2 apart, from a few below those of the other studies to more above them."""
    found = {}
    for optimizer in optimizers:
        lrs = tuple(float(f"{LRS[optimizer] * 2.0**power:.3g}") for power in range(1 - number // 2, 2 + number // 2))
        for name, qk_norm in (("plain", "none"), ("QK-norm", "head")):
            found[f"{name}, {optimizer}"] = Runs({"optimizer": optimizer, "qk_norm": qk_norm}, lrs=lrs)
    return found


def sensitivity(rows: list[dict], measured: dict) -> dict[str, float]:
    """How much is lost, on average over an arm's rates, to its best one. More than at the start is not lost."""
    capped = {arm: [min(loss, measured["initial"]) for loss in group] for arm, group in losses(rows).items()}
    return {arm: mean(group) - min(group) for arm, group in capped.items()}


STUDY = Study(
    "qk-norm-rates",
    [
        difference("plain, muon", "QK-norm, muon", value="sensitivity", reproduced=ABOVE),
        difference("plain, adamw", "QK-norm, adamw", value="sensitivity"),
    ],
    {"S": Protocol(5, S, arms(9, "muon", "adamw")), "M": Protocol(3, M, arms(7, "muon"))},
    values={"sensitivity": sensitivity},
)
