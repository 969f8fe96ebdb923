"""The arms of an ablation: the product of norms, placements and other options of `train.py`."""

from argparse import Namespace
from collections.abc import Iterable
from itertools import product

from config import FIELDS, require
from experiments.ablation.grid import NOT_COMPARED, Settings
from experiments.ablation.outcome import Arm
from norms import KINDS

FLAGS = {"norm": "--norms", "placement": "--placements", "norm_args": "--norms KIND:KEY=VALUE"}
FLAGS |= {"lr": "--lrs", "seed": "--seeds"}
# All arms are evaluated on the same text in the same way, and an ablation never mixes plain and accelerated runs.
SHARED = NOT_COMPARED | {"data", "tokenizer", "vocab_size", "eval_tokens", "device", "fast", "shard"}


def resolve_factors(flags: Namespace) -> list[Arm]:
    """The arms, without checking whether the model supports each. Raises ValueError for invalid flags."""
    for name in ("norm", "placement"):
        require(not hasattr(flags, name), f"--{name} is for a single run; use --{name}s here and list all of them")
    for kind in (norm.partition(":")[0] for norm in flags.norms):
        require(kind in KINDS, f"--norms: unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    factors = {"norm": flags.norms, "placement": flags.placements, **parse_factors(flags.factor)}
    for name in factors:
        flag = f"--{name.replace('_', '-')}"
        require(not hasattr(flags, name), f"{flag} is a factor here; leave out the flag for all runs")
    return [Arm.of(**dict(zip(factors, levels, strict=True))) for levels in product(*factors.values())]


def parse_factors(given: Iterable[str]) -> dict[str, list[str]]:
    """The levels of each `--factor NAME=V1,V2`. Raises ValueError for what is no option that arms may differ in."""
    factors: dict[str, list[str]] = {}
    for text in given:
        dashed, _, values = text.partition("=")
        name, levels = dashed.replace("-", "_"), values.split(",")
        require(name in FIELDS, f"--factor {text}: {dashed!r} is no option of train.py; choose one, such as optimizer")
        require(name not in FLAGS, f"--factor {text}: use {FLAGS.get(name)}")
        require(name not in SHARED, f"--factor {text}: all runs of an ablation share --{dashed}")
        require(name not in factors, f"--factor {text}: {dashed} is given twice; list all values in one")
        require(all(levels) and len(set(levels)) == len(levels), f"--factor {text}: takes NAME=V1,V2, all different")
        factors[name] = levels
    return factors


def check_comparable(settings: Settings) -> None:
    """Raise ValueError if a factor has the side effect that arms use different kernels."""
    for name in ("fast", "compile"):
        values = {getattr(config, name) for _, config in settings.values()}
        factors = next(iter(settings)).factors
        require(
            len(values) == 1 or name in dict(factors),
            f"--factor: some arms would run with --{name} and others without; add --{name} or --no-{name}",
        )
