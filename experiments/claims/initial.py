"""Models at initialization, and norms and placements that exist only while a claim measures them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from experiments.ablation.grid import resolve_arms
from experiments.ablation.outcome import Arm
from experiments.claims.claim import Protocol
from model import Llama
from norms import KINDS, TRAITS, Traits
from norms.placement import PLACEMENTS, Placement


def initial_model(protocol: Protocol, arm: Mapping[str, str], seed: int) -> Llama:
    """The model of an arm on the CPU, with its initial weights."""
    ((model_config, _),) = resolve_arms([Arm.of(**arm)], [*protocol.flags.split(), "--device", "cpu"]).values()
    return Llama(model_config, seed)


def random_batch(model: Llama, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (rows, context) each: uniformly random tokens."""
    shape = (rows, model.config.context + 1)
    ids = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


@contextmanager
def with_norms(kinds: dict[str, type[nn.Module]]) -> Iterator[None]:
    """Offer these norms as `--norm` inside the block."""
    KINDS.update(kinds)
    TRAITS.update({name: Traits() for name in kinds})
    try:
        yield
    finally:
        for name in kinds:
            del KINDS[name], TRAITS[name]


@contextmanager
def with_placements(placements: dict[str, Placement]) -> Iterator[None]:
    """Offer these placements as `--placement` inside the block."""
    PLACEMENTS.update(placements)
    try:
        yield
    finally:
        for name in placements:
            del PLACEMENTS[name]
