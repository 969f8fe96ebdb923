"""The arms of an ablation: the product of norms, placements and other options of `train.py`."""

from argparse import Namespace
from itertools import product

from config import FIELDS, flag_name, match_case, require
from experiments.ablation.grid import NOT_COMPARED
from experiments.ablation.outcome import Arm
from norms import KINDS

OWN_FLAG = {"norm": "--norms", "placement": "--placements", "norm_args": "--norms", "lr": "--lrs", "seed": "--seeds"}
SHARED = NOT_COMPARED | {"data", "tokenizer", "vocab_size", "eval_tokens", "device", "shard"}  # by all arms


def resolve_factors(flags: Namespace) -> list[Arm]:
    """The arms, without checking whether the model supports each. Raises ValueError for invalid flags."""
    factors = {"norm": [], "placement": flags.placements}
    for text in flags.norms:
        kind, colon, norm_args = text.partition(":")
        kind = match_case(kind, KINDS)
        advice = "separate norms with spaces" if "," in kind else f"choose from {', '.join(KINDS)}"
        require(kind in KINDS, f"--norms: unknown kind {kind!r}; {advice}")
        factors["norm"].append(kind + colon + norm_args)
    for text in flags.factor:
        dashed, _, values = text.partition("=")
        name = dashed.replace("-", "_")
        require(name in FIELDS, f"--factor {text}: {dashed!r} is no option of train.py; choose one, such as optimizer")
        require(name not in OWN_FLAG, f"--factor {text}: use {OWN_FLAG.get(name)}")
        require(name not in SHARED, f"--factor {text}: all runs of an ablation share --{dashed}")
        require(name not in factors, f"--factor {text}: {dashed} is given twice; list all values in one")
        factors[name] = values.split(",")
    for name, levels in factors.items():
        flag = OWN_FLAG.get(name, f"--factor {name}")
        require(all(levels) and len(set(levels)) == len(levels), f"{flag} takes values that differ, not {levels}")
        single = flag_name(name)
        require(not hasattr(flags, name), f"{single} is for a single run; list all values with {flag}")
    return [Arm.of(**dict(zip(factors, levels, strict=True))) for levels in product(*factors.values())]
