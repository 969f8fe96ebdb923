"""The command line: text to what was asked, a mapping of options to values, and back for commands that are printed."""

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from types import UnionType
from typing import Any, get_origin

from config import FIELDS, FIXED_ON_RESUME, PRESETS, Asked, ModelConfig, TrainConfig, as_text, check_fields, flag_name
from files import ROOT, BadInput, one_line, require
from machine.process import bad_input
from recipes import RECIPES
from runtime.plugins import import_first

SYNONYMS = {  # names in nanoGPT, Hugging Face and generate.py that are not spelled like ours
    "--learning-rate": "--lr", "--max-iters": "--steps", "--n-embd": "--dim", "--d-model": "--dim",
    "--block-size": "--context", "--seq-len": "--context", "--checkpoint": "--out",
}  # fmt: skip
PATHS = {"data", "val_data", "tokenizer", "init_from", "out", "cache_dir", "config", "checkpoint", "import", "json"}
TRUTH = {"true": True, "false": False}
BY_TYPE: dict[Any, dict[str, Any]] = {  # how argparse reads an option
    bool: {"action": argparse.BooleanOptionalAction},
    dict: {"action": "append", "metavar": "KEY=VALUE"},
    list: {"action": "extend", "nargs": "+", "metavar": "NAME|PATH"},
    UnionType: {"type": lambda text: read_value(text, float), "metavar": "NUMBER|sqrt"},
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises BadInput where argparse exits. A flag that is not given sets nothing."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **options)
        (version,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)
        self.add_argument("--version", action="version", version=f"normal-llama {version}")
        help = "Python file that registers norms or placements; may be repeated"
        self.add_argument("--import", dest="imports", action="append", metavar="FILE.py", help=help)

    def read(self, arguments: list[str]) -> Asked:
        """The options that `arguments` set, with values of their types, such as {"norm_args": {"eps": 1}}."""
        import_first(arguments)
        given = vars(self.parse_args(arguments))
        with bad_input():
            given.pop("imports", None)  # they have been imported
            for name, value in given.items():
                given[name] = expand_path(name, value)
                values = value if isinstance(value, list) else [value]  # empty as a variable that a script has not set
                valid = "" not in values or name == "prompt"
                require(valid, f"{flag_name(name)} must not be empty; leave it out or name a value")
            for name in given.keys() & FIELDS.keys():
                if get_origin(FIELDS[name].type) is dict:
                    given[name] = read_pairs(flag_name(name), given[name])
        return given

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, but reject unknown arguments here, where the flags of a subcommand are known."""
        namespace, unknown = super().parse_known_args(args, namespace)
        known, similar = re.findall(r"--[\w-]+", self.format_usage()), []
        for flag in (text.partition("=")[0].replace("_", "-") for text in unknown if text.startswith("--")):
            similar += difflib.get_close_matches(SYNONYMS.get(flag, flag), known, n=1)
        hint = f"; did you mean {' and '.join(dict.fromkeys(similar))}?" if similar else ""
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown

    def error(self, message: str) -> Any:
        raise BadInput(one_line(message))


def read_train(arguments: list[str]) -> Asked:
    """The options that flags of train.py set. Raises BadInput, naming a bad flag."""
    parser = Parser(prog="train.py", description="Train a LLaMA on text, with a choice of norms and placements.")
    fixed = ", ".join(map(flag_name, FIXED_ON_RESUME))
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out (default: the newest run). Options you pass again replace those of the run "
        f"and are printed; the model, the text, {fixed} cannot change",
    )
    parser.add_argument(
        "--eval-only",
        action="store_true",
        help="only evaluate the newest checkpoint of the run in --out (default: the newest run), or the model in "
        "--init-from; on all of --data or --val-data if you pass other text, or on the val.bin of token files",
    )
    add_flags(parser)
    return parser.read(arguments)


def add_flags(parser: argparse.ArgumentParser, hidden: Collection[str] = ()) -> None:
    """Add a flag for every field of both configurations, and those that stand for several; no help for `hidden`."""
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="set of defaults (default: tiny, shown below, on a CPU, else small). GPU memory: small 4 GB, 124m 16 GB, "
        "1b 80 GB, 7b 80 GB on each of 8 GPUs",
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        metavar="NAME",
        help="norms, residual path and what surrounds them of a released model, without its sizes; other flags come "
        f"after it: {', '.join(RECIPES)}",
    )
    parser.add_argument("--config", metavar="RUN.JSON", help="run.json of an earlier run to take options from")
    add_options(parser.add_argument_group("model"), ModelConfig, hidden)
    add_options(parser.add_argument_group("training"), TrainConfig, hidden)


def add_options(parser: argparse._ActionsContainer, config: type, hidden: Collection[str] = ()) -> None:
    """Add a flag for every field of the dataclass `config` that has a help text."""
    for each in (each for each in dataclasses.fields(config) if each.metadata["help"]):
        python_type: Any = each.type
        plain = {"type": python_type}
        if "choices" not in each.metadata:
            plain["metavar"] = getattr(python_type, "__name__", "").upper()
        argument = BY_TYPE.get(get_origin(python_type) or python_type, plain) | {"dest": each.name, **each.metadata}
        default = each.default_factory() if callable(each.default_factory) else each.default
        if default not in (None, "", [], {}):
            argument["help"] += f" (default: {as_text(default)})"
        if each.name in hidden:
            argument["help"] = argparse.SUPPRESS
        del argument["export"], argument["bounds"]
        parser.add_argument(flag_name(each.name), **argument)


def read_pairs(flag: str, texts: Iterable[str]) -> Asked:
    """{"eps": 1e-5, "bias": False} of "eps=1e-5" and "bias=false"."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        require(equals, f"{flag} takes key=value, not {text!r}")
        pairs[name] = read_value(value)
    return pairs


def read_value(text: str, wanted: Any = None) -> Any:
    """A value of the type `wanted`, or what the text looks like: a truth value, an integer, a number, or itself."""
    wanted = float if isinstance(wanted, UnionType) else wanted  # or else text
    if text.lower() in TRUTH and wanted in (bool, None):
        return TRUTH[text.lower()]
    for number in (int, float):
        if wanted in (number, None):
            with suppress(ValueError):
                return number(text)
    return text


def expand_path(name: str, value: Any) -> Any:
    """The value of an option: paths as text, with the home directory for ~."""
    if isinstance(value, list | tuple):
        return [expand_path(name, part) for part in value]
    if name in PATHS and isinstance(value, str | os.PathLike):
        return os.path.expanduser(value)
    return value


def read_keywords(options: Asked, others: Asked) -> Asked:
    """Options from Python, such as {"out": Path("runs/mine"), "val_data": None}. None is not asked."""
    asked = {name: expand_path(name, value) for name, value in options.items() if value is not None}
    check_fields(asked, "train", others)
    for name, choices in (("preset", PRESETS), ("recipe", RECIPES)):
        valid = name not in asked or asked[name] in choices
        require(valid, f"unknown --{name} {asked.get(name)!r}; choose from {', '.join(choices)}")
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
