"""Do pre-norm models with LayerNorm and with RMSNorm compute the same, if the weights are centered?"""

import copy
import math
from typing import Any

import torch
from torch import nn

from experiments.studies.study import Effect, Protocol, Row, Study, new_model
from model import matrices

SHAPE: dict[str, Any] = {"layers": 4, "tie_embeddings": False}  # the output head is not centered


def logit_errors(protocol: Protocol, seeds: range) -> list[Row]:
    """Relative differences of logits in float64 between LayerNorm without bias and RMSNorm with the same weights."""
    rows = []
    for seed in seeds:
        layernorm, tokens, _ = new_model(seed, norm="layernorm", norm_args={"bias": False, "eps": 1e-6}, **SHAPE)
        rmsnorm, _, _ = new_model(seed, norm_args={"eps": 1e-6}, **SHAPE)
        generator = torch.Generator().manual_seed(seed)
        for gain in layernorm.parameters():
            if gain.ndim == 1:  # gains of 1 could hide a mistake
                nn.init.normal_(gain, 1, 0.5, generator=generator)
        rmsnorm.load_state_dict(layernorm.state_dict())
        centered = copy.deepcopy(rmsnorm).double()
        for role, _, weight in matrices(centered):
            if role.into_stream or role.name == "embedding":  # what writes to the residual stream
                weight.data -= weight.data.mean(0 if role.into_stream else 1, keepdim=True)
        with torch.no_grad():
            expected = layernorm.double()(tokens)
            for arm, model in (("centered", centered), ("not centered", rmsnorm.double())):
                error = float((model(tokens) - expected).abs().max() / expected.abs().max())
                rows.append({"arm": arm, "seed": seed, "value": error})
    return rows


STUDY = Study(
    "prenorm-equivalence",
    [Effect("with centered weights", {"centered": 1}, (-math.inf, 1e-12)), Effect("without", {"not centered": 1})],
    {"initialization": Protocol(5)},
    measure=logit_errors,
    unit="relative difference of the logits",
    exact=True,
)
