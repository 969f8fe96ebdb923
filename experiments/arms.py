"""Which arms an ablation has: all combinations of its factors, at each size of a ladder; and what each one asks."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from config import FIELDS, Asked, ModelConfig, check_fields, combine, flag_name
from data.tokenizer import NoTokenizer
from experiments.costs import Configs, costs
from experiments.records import NOT_COMPARED, SIZE, Arm
from files import require, warn
from norms import KINDS
from norms.placement import PLACEMENTS, Unsupported
from recipes import RECIPES
from runtime.flags import read_pairs, read_value
from runtime.run import read_config_file, resolve

OWN_FLAG = {"norm": "--norms", "placement": "--placements", "lr": "--lrs", "seed": "--seeds"}
OWN_FLAG |= {"norm_args": "--norms", "placement_args": "--placements"}
SHARED = NOT_COMPARED | {"data", "val_data", "text_column", "tokenizer", "vocab_size", "eval_tokens", "device", "shard"}


def pop_options(asked: Asked, config: type) -> Any:
    """The dataclass `config` with those of its fields that are in `asked`, from which they are removed."""
    return config(**{each.name: asked.pop(each.name) for each in fields(config) if each.name in asked})


def asked_of(arm: Arm) -> Asked:
    """What an arm asks of `train.py`. Raises ValueError for a value of another type."""
    asked: Asked = {}
    for name, text in arm.without_size.factors:
        asked[name] = read_value(text, str if name == "recipe" else FIELDS[name].type)
    asked |= read_pairs("--ladder", filter(None, arm.size.split(",")))
    for name in ("norm", "placement"):
        if name in asked:
            asked[name], _, arguments = asked[name].partition(":")
            asked[f"{name}_args"] = read_pairs(f"--{name}s", filter(None, arguments.split(",")))
    check_fields(asked, "--factor", {"recipe": str})
    recipe = asked.get("recipe", "llama")
    require(recipe in RECIPES, f"--factor recipe: unknown {recipe!r}; choose from {', '.join(RECIPES)}")
    return asked


def resolve_arms(arms: Iterable[Arm], shared: Asked, steps: Mapping[str, Asked] = {}) -> Configs:
    """The configurations of each arm, with what all share and with its `steps`. Says why it skips an arm.

    Raises ValueError if the first arm, the baseline, is not supported.
    """
    found: Configs = {}
    previous = read_config_file(shared)
    for arm in arms:
        try:
            _, model, config, *_ = resolve(combine(shared, asked_of(arm), steps.get(arm.name, {})), previous)
        except Unsupported as error:
            require(found, f"the first arm, {arm.name}, is the baseline and cannot be trained: {error}")
            warn(f"skipped: {arm.name}, as {error}")
            continue
        found[arm] = model, config
        require(not config.init_from, "an ablation compares runs from random initialization; leave out --init-from")
        bits = "an ablation compares val_bpb, so token files need their tokenizer: --tokenizer DIR or bytes"
        require(config.tokenizer != NoTokenizer.kind, bits)
    return found


def resolve_factors(norms: Sequence[str], placements: Sequence[str], others: Sequence[str], shared: Asked) -> list[Arm]:
    """The arms of --norms, --placements and --factor, without checking whether the model supports each.

    An arm has a norm or a placement only if --norms or --placements says so: else it is that of its recipe. Raises
    ValueError for invalid options.
    """
    factors: dict[str, Sequence[str]] = {}
    for name, levels, known in (("norm", norms, [*KINDS]), ("placement", placements, [*PLACEMENTS])):
        for text in levels:
            kind = text.partition(":")[0]
            require(kind in known, f"--{name}s: unknown {kind!r}; choose from {', '.join(known)}, separated by spaces")
        if levels:
            factors[name] = levels
    for text in others:
        dashed, _, values = text.partition("=")
        name = dashed.replace("-", "_")
        require(
            name == "recipe" or (name in FIELDS and FIELDS[name].metadata["help"]),
            f"--factor {text}: {dashed!r} is not an option that can vary; choose another of train.py, like optimizer",
        )
        require(name not in OWN_FLAG, f"--factor {text}: use {OWN_FLAG.get(name)}")
        require(name not in SHARED, f"--factor {text}: all runs of an ablation share --{dashed}")
        require(name not in factors, f"--factor {text}: {dashed} is given twice; list all values in one")
        factors[name] = values.split(",")
    varied = {name for name in factors if len(factors[name]) > 1}
    require(
        not varied or varied - {"batch_size", "context"},
        "--factor batch-size or context alone: only runs with the same batches are compared; add --norms or a factor",
    )
    for name in dict.fromkeys(["norm", "placement", *factors]):
        flag = OWN_FLAG.get(name, f"--factor {name}")
        levels = factors.get(name, [])
        require(all(levels) and len(set(levels)) == len(levels), f"{flag} needs distinct values, not {levels}")
        require(name not in shared, f"{flag_name(name)} is for a single run; list all values with {flag}")
    return [Arm(tuple(zip(factors, levels, strict=True))) for levels in product(*factors.values())]


def ladder(widths: Sequence[int], arms: Sequence[Arm], shared: Asked, tokens_per_parameter: float) -> list[Arm]:
    """Each of `arms` at each width. Prints what a size is. Raises ValueError for widths that heads do not divide.

    Heads have the same width at every size, and steps give the same number of tokens per parameter of the first arm.
    """
    distinct = len(set(widths)) == len(widths) > 1
    require(distinct and min(widths) > 0, f"--ladder needs two or more distinct positive widths, not {widths}")
    require(0 < tokens_per_parameter < math.inf, f"--tokens-per-parameter must be positive, not {tokens_per_parameter}")
    given = shared | dict(arms[0].factors)
    for name in ("dim", "heads", "hidden_dim", "steps"):
        require(name not in given, f"{flag_name(name)} follows from --ladder; leave it out")
    ((model, _),) = resolve_arms(arms[:1], shared).values()
    head_dim, sized, lines = model.head_dim, [], []
    for width in sorted(widths):
        advice = f"must be a multiple of the size of a head, {head_dim}; --head-dim sets it"
        require(width % head_dim == 0, f"--ladder {width} {advice}")
        heads = width // head_dim
        ((model, config),) = resolve_arms(arms[:1], shared | {"dim": width, "heads": heads}).values()
        default = ModelConfig(dim=width, heads=heads, mlp=model.mlp).hidden_dim
        fixed = f"--ladder derives --hidden-dim from the width, and --config or --preset fixes it at {model.hidden_dim}"
        require(model.hidden_dim == default, f"{fixed}; use others")
        parameters = costs(model, config)["parameters"]
        steps = max(1, round(tokens_per_parameter * parameters / (config.batch_size * model.context)))
        value = f"dim={width},heads={heads},steps={steps}"
        lines.append(f"{value}: {parameters:,} parameters, {tokens_per_parameter:g} tokens for each")
        sized += [Arm(((SIZE, value), *arm.factors)) for arm in arms]
    print(*lines, sep="\n", file=sys.stderr)
    return sized
