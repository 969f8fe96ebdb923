"""At initialization, do post-norm's last gradients keep their size with depth, and pre-norm's shrink?

Trained, does post-norm gain more from warm-up?
"""

import copy
import math
from itertools import product
from typing import Any

import torch

from experiments.studies.study import Effect, Protocol, Row, Runs, S, Study, new_model, slope

DEPTHS = (6, 12, 24, 48, 96)
FLAT, FALLING = (-0.15, 0.15), (-0.65, -0.35)  # exponents


def gradients_and_updates(protocol: Protocol, seeds: range) -> list[Row]:
    """Of new models with LayerNorm and Xavier's initialization, by placement and depth, the logarithms of three norms.

    They are the norms of the gradient of the last MLP's second matrix, and of the change of the logits after one step
    of SGD, and after one by the gradient's sign.
    """
    rows = []
    for seed, placement, depth in product(seeds, ("post", "pre", "deepnorm"), protocol.depths):
        model, tokens, targets = new_model(seed, norm="layernorm", placement=placement, layers=depth, init="xavier")
        model.loss(tokens, targets).backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        found = {"": gradients[f"layers.{depth - 1}.mlp.down_proj.weight"].norm()}
        with torch.no_grad():
            before = model(tokens)
            for rule, lr in ((", SGD", 1e-3), (", sign", 1e-6)):
                stepped = copy.deepcopy(model)
                for name, weight in stepped.named_parameters():
                    gradient = gradients[name]
                    weight.sub_(gradient if rule == ", SGD" else gradient.sign(), alpha=lr)
                found[rule] = (stepped(tokens) - before).norm()
        for rule, norm in found.items():
            rows.append({"arm": f"{placement} {depth}{rule}", "seed": seed, "value": math.log(norm)})
    return rows


def exponent(name: str, template: str, **more: Any) -> Effect:
    """The exponent of a power law of the number of blocks, for which the template has a place."""
    return slope(name, {math.log(depth): {template.format(depth): 1.0} for depth in DEPTHS}, **more)


def at_depths(name: str, template: str) -> list[Effect]:
    return [Effect(f"{name}, {depth} blocks", {template.format(depth): 1}, ratio=True) for depth in DEPTHS]


def from_warmup(layers: int) -> Effect:
    """What post-norm gains from warm-up minus what pre-norm does, each at the best of its rates."""
    signs = {"post {} with": -1, "post {} without": 1, "pre {} with": 1, "pre {} without": -1}
    name = f"loss saved by warm-up, post-norm − pre-norm, {layers} blocks"
    return Effect(name, {arm.format(layers): sign for arm, sign in signs.items()})


WARMUPS = {
    f"{placement} {layers} {'without' if warmup == '0' else 'with'}": Runs(
        {"optimizer": "adamw", "placement": placement, "layers": layers, "warmup": warmup}, lrs=(3e-4, 1e-3, 3e-3)
    )
    for layers, warmup, placement in product(("6", "12"), ("0", "100"), ("pre", "post"))
}

STUDY = Study(
    "last-gradient",
    [
        exponent("exponent, post-norm", "post {}", reproduced=FLAT),
        exponent("exponent, pre-norm", "pre {}", reproduced=FALLING),
        *at_depths("pre-norm", "pre {}"),
        from_warmup(6),
        from_warmup(12),
    ],
    {"initialization": Protocol(5, depths=DEPTHS), "S": Protocol(3, S, WARMUPS)},
    measure=gradients_and_updates,
    unit="exponent of the number of blocks; nats",
)
