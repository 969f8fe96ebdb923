"""The same arms at several widths: `ablate.py --ladder 32 64 96`.

Every width is a size: heads of the same width, and steps for the same number of tokens per parameter. An arm is
compared with the first one of its size, and the slope of its effect over compute says whether it grows.
"""

import math
import sys
from collections.abc import Sequence

import torch

from config import Asked, flag_name
from experiments.ablation.grid import resolve_arms
from experiments.ablation.outcome import SIZE, Arm
from files import require
from model import Llama

SET = ("dim", "heads", "hidden_dim", "steps")  # options that a size sets


def climb(widths: Sequence[int], arms: Sequence[Arm], shared: Asked, tokens_per_parameter: float) -> list[Arm]:
    """Each of `arms` at each width. Prints what a size is. Raises ValueError for widths that heads do not divide."""
    require(len(set(widths)) > 1 and min(widths) > 0, f"--ladder needs two widths or more, not {widths}")
    require(0 < tokens_per_parameter < math.inf, f"--tokens-per-parameter must be positive, not {tokens_per_parameter}")
    for name in SET:
        given = name in shared or name in dict(arms[0].factors)
        require(not given, f"{flag_name(name)} follows from --ladder; leave it out")
    (head_dim,) = {model.head_dim for model, _ in resolve_arms(arms[:1], shared).values()}
    climbed = []
    for width in sorted(widths):
        advice = f"must be a multiple of the size of a head, {head_dim}; --head-dim sets it"
        require(width % head_dim == 0, f"--ladder {width} {advice}")
        sizes = {"dim": width, "heads": width // head_dim}
        ((model, config),) = resolve_arms(arms[:1], shared | sizes).values()
        with torch.device("meta"):
            parameters = sum(weight.numel() for weight in Llama(model).parameters())
        steps = max(1, round(tokens_per_parameter * parameters / (config.batch_size * model.context)))
        value = ",".join(f"{name}={number}" for name, number in {**sizes, "steps": steps}.items())
        print(f"{value}: {parameters:,} parameters, {tokens_per_parameter:g} tokens for each", file=sys.stderr)
        climbed += [Arm(((SIZE, value), *arm.factors)) for arm in arms]
    return climbed
