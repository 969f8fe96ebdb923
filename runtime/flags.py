"""The command line: text to what was asked, a mapping of options to values, and back for commands that are printed."""

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_origin

from config import (
    FIELDS,
    FIXED_ON_RESUME,
    PRESETS,
    Asked,
    ModelConfig,
    TrainConfig,
    as_text,
    check_fields,
    flag_name,
)
from files import BadInput, one_line, require
from machine.process import bad_input
from runtime.plugins import import_first

SYNONYMS = {  # names in nanoGPT and Hugging Face that are not spelled like ours
    "--learning-rate": "--lr", "--max-iters": "--steps", "--n-embd": "--dim", "--d-model": "--dim",
    "--block-size": "--context", "--seq-len": "--context",
}  # fmt: skip
TRUTH = {"true": True, "false": False}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises BadInput, with one line, where argparse prints the usage and exits."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def read(self, arguments: list[str] | None) -> dict[str, Any]:
        """The options that `arguments` set, with values of their types. `--norm-arg eps=1` is {"norm_args": {...}}."""
        given = vars(self.parse_args(arguments))
        given.pop("imports", None)  # `import_first` has imported them
        with bad_input():
            for name in given.keys() & FIELDS.keys():
                if get_origin(FIELDS[name].type) is dict:
                    given[name] = read_pairs(flag_name(name), given[name])
        return given

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, but reject unknown arguments here, where the flags of a subcommand are known."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = re.findall(r"--[\w-]+", self.format_usage())
            similar = []
            for text in unknown:
                if text.startswith("--"):
                    name = text.partition("=")[0].replace("_", "-")
                    similar += difflib.get_close_matches(SYNONYMS.get(name, name), known, n=1)
            hint = f"; did you mean {' and '.join(dict.fromkeys(similar))}?" if similar else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown

    def error(self, message: str) -> Any:
        raise BadInput(one_line(message))


def read_train(arguments: list[str] | None) -> dict[str, Any]:
    """What flags of train.py ask for. The files of --import are imported. Raises BadInput, naming a bad flag."""
    parser = Parser(prog="train.py", description="Train a LLaMA on text, with a choice of norms and placements.")
    fixed = ", ".join(map(flag_name, FIXED_ON_RESUME))
    unset: dict[str, Any] = {"action": "store_true", "default": argparse.SUPPRESS}
    parser.add_argument(
        "--resume",
        help="continue the run in --out (default: the newest run). Options you pass again replace those of the run "
        f"and are printed; the model, the text, {fixed} cannot change",
        **unset,
    )
    parser.add_argument(
        "--eval-only",
        help="only evaluate the newest checkpoint of the run in --out (default: the newest run), or the model in "
        "--init-from; on all of --data or --val-data if you pass other text",
        **unset,
    )
    add_flags(parser)
    import_first(parser, arguments)
    return parser.read(arguments)


def add_flags(parser: argparse.ArgumentParser, hidden: Collection[str] = ()) -> None:
    """Add `--preset`, `--config` and a flag for every field of both configurations; no help for those in `hidden`."""
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="set of defaults (default: tiny, shown below, on a CPU, else small). GPU memory: small 4 GB, 124m 16 GB, "
        "1b 80 GB, 7b 80 GB on each of 8 GPUs",
        **unset,
    )
    run = "run.json of an earlier run to take options from"
    parser.add_argument("--config", metavar="RUN.JSON", help=run, **unset)
    add_options(parser.add_argument_group("model"), ModelConfig, hidden)
    add_options(parser.add_argument_group("training"), TrainConfig, hidden)


def add_options(parser: argparse._ActionsContainer, config: type, hidden: Collection[str] = ()) -> None:
    """Add a flag for every field of the dataclass `config`. A flag that is not given sets nothing."""
    for field in (field for field in dataclasses.fields(config) if field.metadata["help"]):
        kind: Any = field.type
        several = field.default_factory
        default = field.default if several is dataclasses.MISSING else " ".join(several())
        argument = {"type": kind}
        if kind is bool:
            argument = {"action": argparse.BooleanOptionalAction}
        elif get_origin(kind) is dict:
            argument = {"action": "append", "metavar": "KEY=VALUE"}
        elif get_origin(kind) is list:
            argument = {"action": "extend", "nargs": "+", "metavar": "NAME|PATH"}
        elif "choices" not in field.metadata:
            argument["metavar"] = kind.__name__.upper()
        argument |= {"dest": field.name, "default": argparse.SUPPRESS, **field.metadata}
        del argument["export"]
        if default not in (None, ""):
            argument["help"] += f" (default: {default})"
        if field.name in hidden:
            argument["help"] = argparse.SUPPRESS
        parser.add_argument(flag_name(field.name), **argument)


def take(given: dict[str, Any], config: type) -> Any:
    """The dataclass `config` with those of its fields that are in `given`, from which they are removed."""
    names = [field.name for field in dataclasses.fields(config) if field.name in given]
    return config(**{name: given.pop(name) for name in names})


def read_pairs(flag: str, texts: Iterable[str]) -> dict[str, Any]:
    """{"eps": 1e-5, "bias": False} of "eps=1e-5" and "bias=false"."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        require(equals, f"{flag} takes key=value, not {text!r}")
        pairs[name] = read_value(value)
    return pairs


def read_value(text: str, kind: Any = None) -> Any:
    """A value of the type `kind`, or else what the text looks like: a truth value, an integer, a number, or itself."""
    if text.lower() in TRUTH and kind in (bool, None):
        return TRUTH[text.lower()]
    for number in (int, float):
        if kind in (number, None):
            try:
                return number(text)
            except ValueError:
                continue
    return text


def read_keywords(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Options from Python, such as {"norm_args": {"alpha": 0.5}, "out": Path("runs/mine")}. None is not asked.

    Raises ValueError, naming the option, for one that is neither a field nor `known`, and for a value of another type.
    """
    asked: dict[str, Any] = {}
    for name, value in options.items():
        if name not in FIELDS.keys() | set(known):
            similar = difflib.get_close_matches(name, [*FIELDS, *known], n=1)
            raise ValueError(f"{name!r} is not an option" + (f"; did you mean {similar[0]}?" if similar else ""))
        if isinstance(value, list | tuple):
            value = [os.fspath(part) if isinstance(part, os.PathLike) else part for part in value]
        elif isinstance(value, os.PathLike):
            value = os.fspath(value)
        if value is not None:
            asked[name] = value
    check_fields({name: value for name, value in asked.items() if name in FIELDS}, "train")
    return asked


def to_flags(asked: Asked) -> list[str]:
    """Flags that ask for the same, such as {"norm": "dyt", "norm_args": {"alpha": 0.5}, "tie_embeddings": False}."""
    flags = []
    for name, value in asked.items():
        flag = flag_name(name)
        if (value is False and name not in FIELDS) or value == []:
            continue  # --resume has no opposite, and a list needs an item
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, dict):
            flags += [f"{flag}={key}={as_text(part)}" for key, part in value.items()]
        elif isinstance(value, list | tuple):
            flags += [flag, *map(str, value)]
        elif value is not None:
            flags.append(f"{flag}={value}")
    return flags
