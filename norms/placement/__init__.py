"""Where the norm goes around a sublayer. A placement is a kind of residual connection.

It owns its norms and scalars and receives the sublayer as an argument, so a block reads the same with every placement.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from norms.placement import many_streams as many
from norms.placement import ngpt
from norms.placement import one_stream as one
from norms.placement.one_stream import PostNorm, PreNorm, Site, without_final_norm  # noqa: F401 (for --import)
from norms.registry import TRAITS, check_arguments


class Unsupported(ValueError):
    """A placement that is not supported with this norm."""


def as_tuple(stream: Any) -> tuple[Tensor, ...]:
    return stream if isinstance(stream, tuple) else (stream,)


@dataclass(frozen=True)
class Placement:
    """What a placement says about the whole model. `connection` builds the residual connection at one site.

    The first three take the keywords of --placement-arg, if `connection` has any. The stream is what blocks pass on: a
    tensor, or a tuple of tensors.
    """

    connection: Callable[..., nn.Module]  # gets the Site
    final_norm: Callable[..., nn.Module] = lambda site, **_: site.make_norm(site.name)  # between stream and head
    init_stream: Callable[..., Any] = lambda x, **_: x  # turns the embedding into the stream
    streams: Callable[[Any], tuple[Tensor, ...]] = as_tuple  # what --watch measures: one tensor or two
    init: str = "normal"  # the default of --init
    init_gain: Callable[[str, int], float] = lambda role, depth: 1.0  # scales the draw of a weight, by roles.ROLES
    depth_scaled: bool = True  # the default of --depth-scaled-init
    qkv_norm: bool = False  # attention normalizes the queries, keys and values of each head
    without_norm: bool = False  # supported with --norm none
    own_norm: bool = False  # N is built in: --norm and --norm-arg must keep their defaults
    rotated_norm: Callable[[str, Any], nn.Module] | None = None  # of "query" and "key", after RoPE, for a configuration
    scale: Callable[[Any, Any], Any] = lambda linear, config: linear  # what becomes of the matrices gate, up and head
    # Called with each matrix and its role, after it is drawn and after each step.
    constrain: Callable[[Tensor, Any], None] | None = None


# Depth-scaled init is off if the placement scales all streams by depth, or if a norm after the sublayer undoes it.
PLACEMENTS = {
    "pre": Placement(one.PreNorm, without_norm=True),
    "post": Placement(one.PostNorm, one.without_final_norm),
    "deepnorm": Placement(
        one.DeepNorm, one.without_final_norm, init="xavier", init_gain=one.deepnorm_gain, depth_scaled=False,
    ),
    "sandwich": Placement(one.Sandwich, depth_scaled=False),
    "reordered": Placement(one.Reordered, depth_scaled=False),
    "lns": Placement(one.LayerNormScaling, depth_scaled=False),
    "mix": Placement(one.mix_norm),
    "residual": Placement(many.ResiDual, many.ResiDualOutput, many.duplicate),
    "hybrid": Placement(one.hybrid_norm, qkv_norm=True),
    "hybrid-star": Placement(one.hybrid_star, qkv_norm=True),
    "siamese": Placement(many.Siamese, many.SiameseOutput, many.duplicate),
    "rezero": Placement(one.ReZero, without_norm=True),
    "keel": Placement(one.keel, one.without_final_norm, depth_scaled=False),
    "ngpt": Placement(
        ngpt.NormalizedUpdate, one.without_final_norm, ngpt.init_on_sphere, depth_scaled=False, own_norm=True,
        rotated_norm=ngpt.rotated_norm, scale=ngpt.scale, constrain=ngpt.return_to_sphere,
    ),
    "parallel": Placement(one.parallel, streams=lambda stream: as_tuple(stream)[:1]),
    "minimax": Placement(one.NormThenResidual),
    "mhc": Placement(many.HyperConnection, many.HyperConnectionOutput, many.copies),
    "attnres": Placement(many.AttentionResidual, many.AttentionResidualOutput, many.one_source, many.newest),
    "attnres-block": Placement(many.BlockAttentionResidual, many.AttentionResidualOutput, many.one_source, many.newest),
}  # fmt: skip


def register_placement(name: str, placement: Placement) -> None:
    """Make a placement available as `--placement name`. Raises ValueError for a name that exists."""
    if name in PLACEMENTS:
        raise ValueError(f"placement {name!r} is registered twice; choose another name")
    PLACEMENTS[name] = placement


def check_placement(name: str, norm: str, norm_args: dict[str, Any], placement_args: dict[str, Any]) -> None:
    """Raise Unsupported if a placement is not supported with that norm, ValueError unless it has these arguments."""
    placement = PLACEMENTS[name]
    check_arguments(f"placement {name!r}", placement.connection, placement_args)
    if placement.own_norm and (norm_args or norm != "rmsnorm"):
        raise Unsupported(f"--placement {name} has a built-in norm; leave out --norm and --norm-arg")
    if TRAITS[norm].identity and not placement.without_norm:
        choices = " or ".join(name for name, placement in PLACEMENTS.items() if placement.without_norm)
        raise Unsupported(f"--norm none is not supported with --placement {name}; choose {choices}")
