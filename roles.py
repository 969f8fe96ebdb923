"""Matrices of the model, their roles, and their initial values."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from config import ModelConfig
from files import require
from norms import KINDS
from norms.placement import PLACEMENTS


@dataclass(frozen=True)
class Role:
    """What a matrix is for. Initial weights, optimizers, generation and placements ask it."""

    name: str
    hidden: bool = True  # in a block: Muon trains it, and it is decayed
    into_stream: bool = False  # a projection into the residual stream
    low_precision: bool = True  # stored in the dtype of products if the model only generates


EMBEDDING = Role("embedding", hidden=False, low_precision=False)
ROLES = [EMBEDDING, *map(Role, ("query", "key", "value", "gate", "up", "attention_gate")), Role("head", hidden=False)]
ROLES += [Role("attention_out", into_stream=True), Role("down", into_stream=True)]
ROLES += [Role("stream_map", low_precision=False)]


class Linear(nn.Linear):
    """`nn.Linear` whose weight is drawn by its role, a name in `ROLES`, and is zero until then. A bias starts at 0."""

    def __init__(self, inputs: int, outputs: int, role: str, bias: bool = False):
        self.role = next((each for each in ROLES if each.name == role), None)  # known when the weight is made
        require(self.role, f"role {role!r} is not known: add it to ROLES in roles.py")
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def matrices(model: Any) -> Iterator[tuple[Role, str, nn.Parameter]]:
    """Role, Hugging Face name and weight of every matrix of `model`; a tied one once, as the embedding."""
    for path, module in model.named_modules():
        role = getattr(module, "role", None)
        if role and not (module is model.lm_head and module.weight is model.embed_tokens.weight):
            yield role, f"{'' if module is model.lm_head else 'model.'}{path}.weight", module.weight


@torch.no_grad()
def draw_weights(model: Any, seed: int, copy: Callable = Tensor.copy_) -> None:
    """Draw every matrix from N(0, std²), std by its role. Norms and residual connections initialize their parameters.

    The unscaled draw is a function of the seed, the matrix's Hugging Face name (or its path) and its shape, and is made
    on the CPU: models that differ in their norm start from the same weights, on every device. `copy` puts it into a
    weight, which may be sharded. Raises ValueError for a matrix without a role.
    """
    known = {weight for _, _, weight in matrices(model)}
    own = [each for block in model.layers for each in (block.attention_residual, block.mlp_residual)]
    own += [each for each in model.modules() if isinstance(each, tuple(KINDS.values()))]
    known.update(weight for each in own for weight in each.parameters())
    for name, weight in model.named_parameters():
        valid = weight.ndim < 2 or weight in known
        require(valid, f"{name} is a matrix without a role; make it with model.Linear(inputs, outputs, role)")
    constrain = PLACEMENTS[model.config.placement].constrain
    for role, name, weight in matrices(model):
        if not weight.is_meta:
            source = hashlib.sha256(f"{seed} {name} {tuple(weight.shape)}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(source[:7]))
            draw = torch.randn(weight.shape, generator=generator, device="cpu", dtype=torch.float32)
            draw *= initial_std(model.config, role, weight.shape)
            if constrain:
                constrain(draw, role)
            copy(weight, draw)


def initial_std(config: ModelConfig, role: Role, shape: torch.Size) -> float:
    """Initial standard deviation of a weight of `shape`.

    `normal` is 0.02, divided by sqrt(2 layers) for the projections into the residual stream (GPT-2). `xavier` is
    sqrt(2 / (inputs + outputs)), but 0.02 for the embedding, whose rows are looked up, not summed over.
    """
    gain = PLACEMENTS[config.placement].init_gain(role.name, config.layers)
    if config.init == "xavier" and role.name != "embedding":
        return gain * math.sqrt(2 / sum(shape))
    if config.depth_scaled_init and role.into_stream:
        gain /= math.sqrt(2 * config.layers)
    return gain * 0.02
