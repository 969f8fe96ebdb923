"""Claims about models at initialization, one of which is shown after training as well, and about speed."""

import copy
import math
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from config import TrainConfig
from experiments.benchmarks import time_alternately, training_step
from experiments.claims.claim import Claim, Effect, Measured, Protocol, difference, slope
from experiments.claims.measure import Lab
from experiments.claims.trained import WARMUPS, S
from model import Llama, weights_by_role

DEPTHS = (6, 12, 24, 48, 96)
WRITERS = ("embedding", "attention_out", "down")  # the roles that write to the residual stream


def initial(seed: int, **options: Any) -> tuple[Llama, Tensor, Tensor]:
    """A model of width 64, and a batch of random tokens: inputs and targets."""
    model = Llama(seed=seed, **{"dim": 64, "heads": 2, "context": 64, "vocab_size": 257} | options)
    ids = torch.randint(257, (8, 65), generator=torch.Generator().manual_seed(seed))
    return model, ids[:, :-1], ids[:, 1:]


def equivalence(protocol: Protocol, lab: Lab) -> Measured:
    """Relative differences of logits in float64 between LayerNorm without bias and RMSNorm with the same weights."""
    shape: dict[str, Any] = {"layers": 4, "tie_embeddings": False}  # the output head is not centered
    rows = []
    for seed in lab.seeds(protocol):
        layernorm, tokens, _ = initial(seed, norm="layernorm", norm_args={"bias": False, "eps": 1e-6}, **shape)
        rmsnorm = initial(seed, norm_args={"eps": 1e-6}, **shape)[0]
        generator = torch.Generator().manual_seed(seed)
        for gain in layernorm.parameters():
            if gain.ndim == 1:  # gains of 1 could hide a mistake
                nn.init.normal_(gain, 1, 0.5, generator=generator)
        rmsnorm.load_state_dict(layernorm.state_dict())
        centered = copy.deepcopy(rmsnorm).double()
        for role, _, weight in weights_by_role(centered):
            if role in WRITERS:
                weight.data -= weight.data.mean(1 if role == "embedding" else 0, keepdim=True)
        with torch.no_grad():
            expected = layernorm.double()(tokens)
            for arm, model in (("centered", centered), ("not centered", rmsnorm.double())):
                error = float((model(tokens) - expected).abs().max() / expected.abs().max())
                rows.append({"arm": arm, "seed": seed, "value": error})
    return {"runs": rows}


def speed(protocol: Protocol, lab: Lab) -> Measured:
    """ln of the seconds of a training step: for each seed the median of ten steps, which all arms take in turn."""
    torch.set_num_threads(1)
    steps = {}
    for norm, compiled in product(("rmsnorm", "layernorm"), (False, True)):
        model = Llama(norm=norm, vocab_size=257)  # the default width of 128 and context of 256
        name = f"{norm}, compiled" if compiled else norm
        steps[name] = training_step(model, TrainConfig(compile=compiled), torch.float32)
    rows = []
    for seed in lab.seeds(protocol):
        for arm, seconds in time_alternately(steps, 10, torch.device("cpu")).items():
            rows.append({"arm": arm, "seed": seed, "value": math.log(seconds)})
    return {"runs": rows}


def by_depth(protocol: Protocol, lab: Lab) -> Measured:
    """Of new models with LayerNorm and Xavier's initialization, by placement and depth, the logarithms of three norms.

    They are that of the gradient of the last MLP's second matrix, and that of the change of the logits after one step
    of SGD, and after one by the gradient's sign.
    """
    rows = []
    for seed, placement, depth in product(lab.seeds(protocol), ("post", "pre", "deepnorm"), protocol.depths):
        model, tokens, targets = initial(seed, norm="layernorm", placement=placement, layers=depth, init="xavier")
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
    return {"runs": rows}


def over_depth(name: str, template: str, **more: Any) -> Effect:
    """The exponent of a power law. The template has a place for the number of blocks."""
    return slope(name, {math.log(depth): {template.format(depth): 1.0} for depth in DEPTHS}, **more)


def at_depths(name: str, template: str) -> list[Effect]:
    """Shown at every depth."""
    return [Effect(f"{name}, {depth} blocks", {template.format(depth): 1}, ratio=True, x=depth) for depth in DEPTHS]


def from_warmup(layers: int) -> Effect:
    """What post-norm gains from warm-up minus what pre-norm does, each at the best of its rates."""
    post = {f"post {layers} with": -1, f"post {layers} without": 1}
    return Effect(
        f"loss saved by warm-up, post-norm − pre-norm, {layers} blocks",
        post | {f"pre {layers} with": 1, f"pre {layers} without": -1},
    )


FLAT, FALLING = (-0.15, 0.15), (-0.65, -0.35)

CLAIMS = (
    Claim(
        "prenorm-equivalence",
        effects=(
            Effect("with centered weights", {"centered": 1}, (-math.inf, 1e-12)),
            Effect("without", {"not centered": 1}),
        ),
        protocols={"initialization": Protocol(5)},
        measure=equivalence,
        exact=True,
    ),
    Claim(
        "rmsnorm-speed",
        effects=(
            difference("rmsnorm", "layernorm", reproduced=(-math.inf, math.log(0.93)), ratio=True),
            difference("rmsnorm, compiled", "layernorm, compiled", ratio=True),
        ),
        protocols={"M": Protocol(10)},
        measure=speed,
        dashed=0.93,
    ),
    Claim(
        "last-gradient",
        effects=(
            over_depth("exponent, post-norm", "post {}", reproduced=FLAT),
            over_depth("exponent, pre-norm", "pre {}", reproduced=FALLING),
            *at_depths("pre-norm", "pre {}"),
            from_warmup(6),
            from_warmup(12),
        ),
        protocols={"initialization": Protocol(5, depths=DEPTHS), "S": Protocol(3, S, WARMUPS)},
        measure=by_depth,
        over="blocks",
        across="gradient with pre-norm",
    ),
    Claim(
        "deepnorm-update",
        effects=(
            over_depth("exponent, DeepNorm", "deepnorm {}, SGD", reproduced=FLAT),
            over_depth("exponent, post-norm", "post {}, SGD"),
            over_depth("exponent, DeepNorm, sign", "deepnorm {}, sign"),
            *at_depths("DeepNorm", "deepnorm {}, SGD"),
        ),
        protocols={"initialization": Protocol(5, depths=DEPTHS)},
        measure=by_depth,
        over="blocks",
        across="update with DeepNorm",
    ),
)
