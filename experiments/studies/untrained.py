"""Studies of models at initialization, of the time of a step, and of what warm-up saves."""

import copy
import math
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from config import TrainConfig
from experiments.benchmarks import Step, time_alternately
from experiments.studies.study import Effect, Protocol, Runs, S, Study, Values, difference, slope
from model import Llama
from roles import matrices

DEPTHS = (6, 12, 24, 48, 96)
FLAT, FALLING = (-0.15, 0.15), (-0.65, -0.35)  # exponents
AT_DEPTHS = Protocol(5, depths=DEPTHS)


def new_model(seed: int, **options: Any) -> tuple[Llama, Tensor, Tensor]:
    """A model of width 64, and a batch of random tokens: inputs and targets."""
    model = Llama(seed=seed, dim=64, heads=2, context=64, vocab_size=257, **options)
    ids = torch.randint(257, (8, 65), generator=torch.Generator().manual_seed(seed))
    return model, ids[:, :-1], ids[:, 1:]


def logit_errors(protocol: Protocol, seed: int) -> Values:
    """Relative differences of logits in float64 between LayerNorm without bias and RMSNorm with the same weights."""
    shape: dict[str, Any] = {"layers": 4, "tie_embeddings": False}  # the output head is not centered
    layernorm, tokens, _ = new_model(seed, norm="layernorm", norm_args={"bias": False, "eps": 1e-6}, **shape)
    rmsnorm, _, _ = new_model(seed, norm_args={"eps": 1e-6}, **shape)
    generator = torch.Generator().manual_seed(seed)
    for gain in layernorm.parameters():
        if gain.ndim == 1:  # gains of 1 could hide a mistake
            nn.init.normal_(gain, 1, 0.5, generator=generator)
    rmsnorm.load_state_dict(layernorm.state_dict())
    centered = copy.deepcopy(rmsnorm).double()
    for role, _, weight in matrices(centered):
        if role.into_stream or role.name == "embedding":  # these write to the residual stream
            weight.data -= weight.data.mean(0 if role.into_stream else 1, keepdim=True)
    with torch.no_grad():
        expected = layernorm.double()(tokens)
        models = {"centered": centered, "not centered": rmsnorm.double()}
        errors = {arm: (model(tokens) - expected).abs().max() for arm, model in models.items()}
    return {arm: float(error / expected.abs().max()) for arm, error in errors.items()}


@cache
def steps() -> dict[str, Step]:
    """A training step by norm, plain and compiled."""
    torch.set_num_threads(1)
    found = {}
    for norm, compiled in product(("rmsnorm", "layernorm"), (False, True)):
        model = Llama(norm=norm, vocab_size=257)  # the default width of 128 and context of 256
        found[f"{norm}, compiled" if compiled else norm] = Step(model, TrainConfig(compile=compiled), torch.float32)
    return found


def step_times(protocol: Protocol, seed: int) -> Values:
    """ln of the seconds of a training step, the median of ten. All arms take theirs in turn."""
    seconds = time_alternately(steps(), 10, torch.device("cpu"))
    return {arm: math.log(median) for arm, median in seconds.items()}


def gradients_and_updates(protocol: Protocol, seed: int) -> Values:
    """Of new models with LayerNorm and Xavier's initialization, by placement and depth, the logarithms of three norms.

    They are the norms of the gradient of the last MLP's second matrix, and of the change of the logits after one step
    of SGD, and after one by the gradient's sign.
    """
    found: Values = {}
    for placement, depth in product(("post", "pre", "deepnorm"), protocol.depths):
        model, tokens, targets = new_model(seed, norm="layernorm", placement=placement, layers=depth, init="xavier")
        model.loss(tokens, targets).backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        norms = {"": gradients[f"layers.{depth - 1}.mlp.down_proj.weight"].norm()}
        with torch.no_grad():
            before = model(tokens)
            for rule, lr, direction in ((", SGD", 1e-3, Tensor.clone), (", sign", 1e-6, Tensor.sign)):
                stepped = {name: model.get_parameter(name) - lr * direction(gradients[name]) for name in gradients}
                norms[rule] = (functional_call(model, stepped, tokens) - before).norm()
        found |= {f"{placement} {depth}{rule}": math.log(norm) for rule, norm in norms.items()}
    return found


def exponent(name: str, template: str, **more: Any) -> Effect:
    """The exponent of a power law of the number of blocks, for which the template has a place."""
    return slope(name, {depth: {template.format(depth): 1.0} for depth in DEPTHS}, **more)


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

STUDIES = [
    Study(
        "prenorm-equivalence",
        [Effect("with centered weights", {"centered": 1}, (-math.inf, 1e-12)), Effect("without", {"not centered": 1})],
        {"initialization": Protocol(5)},
        measure=logit_errors,
        unit="relative difference of the logits",
        exact=True,
    ),
    Study(
        "rmsnorm-speed",
        [
            difference("rmsnorm", "layernorm", ratio=True, reproduced=(-math.inf, math.log(0.93))),
            difference("rmsnorm, compiled", "layernorm, compiled", ratio=True),
        ],
        {"M": Protocol(10)},
        measure=step_times,
        unit="ln(time with RMSNorm / with LayerNorm)",
    ),
    Study(
        "last-gradient",
        [
            exponent("exponent, post-norm", "post {}", reproduced=FLAT),
            exponent("exponent, pre-norm", "pre {}", reproduced=FALLING),
            *at_depths("pre-norm", "pre {}"),
            from_warmup(6),
            from_warmup(12),
        ],
        {"initialization": AT_DEPTHS, "S": Protocol(3, S, WARMUPS)},
        measure=gradients_and_updates,
        unit="exponent of the number of blocks; nats",
    ),
    Study(
        "deepnorm-update",
        [
            exponent("exponent, DeepNorm", "deepnorm {}, SGD", reproduced=FLAT),
            exponent("exponent, post-norm", "post {}, SGD"),
            exponent("exponent, DeepNorm, sign", "deepnorm {}, sign"),
            *at_depths("DeepNorm", "deepnorm {}, SGD"),
        ],
        {"initialization": AT_DEPTHS},
        measure=gradients_and_updates,
        unit="exponent of the number of blocks",
    ),
]
