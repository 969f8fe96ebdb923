"""Where the norm goes around a sublayer: a placement is a residual connection.

It owns its norms and scalars and is handed the sublayer when it is called, so a block reads the same under every
placement.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from norms.placement.one_stream import (
    DeepNorm,
    LayerNormScaling,
    PostNorm,
    PreNorm,
    Reordered,
    ReZero,
    Sandwich,
    deepnorm_gain,
    final_norm,
    hybrid_norm,
    mix_norm,
    no_final_norm,
)
from norms.placement.site import MakeNorm, Site
from norms.placement.two_streams import FinishResiDual, FinishSiamese, ResiDual, Siamese, start_two

__all__ = ["PLACEMENTS", "MakeNorm", "Placement", "Site", "Unsupported", "check_placement"]


class Unsupported(ValueError):
    """A placement that makes no sense with this norm or this number of layers."""


def same(x: Tensor) -> Tensor:
    return x


def no_gain(role: str, depth: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Placement:
    """What a placement says about the whole model. `residual` builds the connection at one site."""

    residual: Callable[[Site], nn.Module]
    finish: Callable[[MakeNorm], nn.Module] = final_norm  # builds the module between the stream and the head
    start: Callable[[Tensor], Any] = same  # turns the embedding into the stream, or the pair of streams
    init: str = "normal"  # the default of --init
    init_gain: Callable[[str, int], float] = no_gain  # scales the draw of a weight by role (see model.ROLES) and depth
    depth_scaled: bool = True  # whether --depth-scaled-init applies
    qkv_norm: bool = False  # attention normalizes the queries, keys and values of each head
    least_layers: int = 1
    bare: bool = False  # makes sense with --norm none


# Depth-scaled init is off where the placement scales by depth itself, or a norm after the sublayer undoes it.
PLACEMENTS = {
    "pre": Placement(PreNorm, bare=True),
    "post": Placement(PostNorm, no_final_norm),
    "deepnorm": Placement(DeepNorm, no_final_norm, init="xavier", init_gain=deepnorm_gain, depth_scaled=False),
    "sandwich": Placement(Sandwich, depth_scaled=False),
    "reordered": Placement(Reordered, depth_scaled=False),
    "lns": Placement(LayerNormScaling, depth_scaled=False),
    "mix": Placement(mix_norm, least_layers=2),
    "residual": Placement(ResiDual, FinishResiDual, start_two),
    "hybrid": Placement(hybrid_norm, qkv_norm=True),
    "siamese": Placement(Siamese, FinishSiamese, start_two),
    "rezero": Placement(ReZero, bare=True),
}


def check_placement(name: str, layers: int, identity: bool) -> None:
    """Raise Unsupported where a placement makes no sense with so few layers or with the identity as its norm."""
    placement = PLACEMENTS[name]
    if layers < placement.least_layers:
        raise Unsupported(
            f"--placement {name} needs --layers {placement.least_layers} or more: it has two kinds of blocks"
        )
    if identity and not placement.bare:
        choices = " or ".join(name for name, placement in PLACEMENTS.items() if placement.bare)
        raise Unsupported(f"--norm none makes no sense with --placement {name}; choose {choices}")
