"""Runs that are compared, a record each, and `runs.csv`, which holds all of them."""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from config import DEFAULTS, FIELDS, MAX_SIZE, REMOVED, Asked, as_text
from files import digest, one_line, require
from norms.registry import TRAITS, Traits
from recipes import RECIPES
from runtime.flags import TRUTH
from runtime.run_dir import Row, RunFile

LONGEST = 200  # characters of a name that is shown
SIZE = "size"  # the factor of --ladder: "dim=64,heads=4,steps=400"
LOSSY = "lossy"  # the factor of arms whose tokenizer loses text
SEARCH = 1000  # from this one on, seeds only choose a learning rate; there are fewer reported ones
# Options that change no result. A run that is continued gets those of the command that continues it.
RESUMED_WITH = ("cache_dir", "log", "keep", "save_every", "save_minutes", "max_minutes", "watch")
NOT_COMPARED = {*RESUMED_WITH, "out"}
COSTS = ("parameters", "tokens", "flops", "step_time")
# Options that may follow from others. And those that follow from no recipe, tokenizer or size, nor from their costs.
FOLLOW = {
    "heads": ["dim", "mlp"],
    "kv_heads": ["dim", "mlp"],
    "head_dim": ["dim", "mlp"],
    "hidden_dim": ["dim", "mlp"],
    "init": ["placement"],
    "depth_scaled_init": ["placement"],
}
FREE = FIELDS.keys() - {"dim", "vocab_size", "steps", "warmup", "compile"}
FREE = FREE.difference(*RECIPES.values())


@dataclass(frozen=True)
class Arm:
    """A value for each factor, in the order of the report's columns. A norm may have arguments: `dyt:alpha=0.8`."""

    factors: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, /, **factors: str) -> "Arm":
        """`Arm.of(norm="dyt:alpha=0.8", placement="pre", batch_size="4")`."""
        return cls(tuple(factors.items()))

    @property
    def name(self) -> str:
        """The width, the norm, the placement, the recipe, and other factors with their names."""
        named = ("norm", "placement", "recipe", "name", "folder", LOSSY)
        values = [value if name in named else f"{name}={value}" for name, value in self.without_size.factors]
        return shown(" ".join(filter(None, [self.size.split(",")[0], *values])) or "model")

    @property
    def size(self) -> str:
        """Its size in a ladder, or ""."""
        return shown(dict(self.factors).get(SIZE, ""))

    @property
    def without_size(self) -> "Arm":
        """Without the factor of a ladder."""
        return Arm(tuple(factor for factor in self.factors if factor[0] != SIZE))


@dataclass(frozen=True)
class Record:
    """A planned run of an arm, and what has come of it. What is not known is None or "".

    A run diverged if its loss or a gradient was not finite at `step`, or if its final loss is above that of a uniform
    prediction. Final losses are None if the last step was not evaluated.
    """

    arm: Arm
    lr: float
    seed: int
    search: bool = False  # it only chooses a learning rate
    diverged: bool = False
    step: int = 0
    val_loss: float | None = None  # nats per token
    val_bpb: float | None = None  # bits per UTF-8 byte
    seconds: float | None = None
    run: str = ""
    parameters: int | None = None
    tokens: int | None = None  # of the whole run
    flops: float | None = None  # the same
    step_time: float | None = None  # seconds of a step over those of the first arm of its size, measured alone
    lost: float = 0.0  # the share of the text that its tokenizer loses
    machine: str = ""
    commit: str = ""
    settings: dict[str, str] = field(default_factory=dict)  # options that are not at their defaults, as flags
    log: list[Row] = field(default_factory=list, compare=False)  # the rows of its metrics.jsonl
    folder: str = field(default="", compare=False)  # where it was found

    @property
    def ended(self) -> bool:
        """Whether it has a final loss, or diverged."""
        return self.diverged or self.val_loss is not None

    @property
    def path(self) -> Path:
        """Its run directory."""
        cell = Path(self.folder, "cells", self.run)
        return cell if cell.exists() else Path(self.run)

    @property
    def known(self) -> bool:
        """Whether its options are known, which earlier reports do not have."""
        return bool(self.options.get("data"))

    @property
    def options(self) -> dict[str, str]:
        """All that is known of what it was asked. A factor is spelled as the user did."""
        return self.settings | dict(self.arm.factors)

    @property
    def steps(self) -> int:
        return int(self.options.get("steps", UNNAMED["steps"]))

    @property
    def costs(self) -> dict[str, float]:
        """Of the whole run, NaN if they are not known. Time is in steps of the first arm of its size."""
        time = self.steps * (self.step_time or math.nan)
        return {"tokens": self.tokens or math.nan, "time": time, "FLOPs": self.flops or math.nan}


COLUMNS: dict[str, Any] = {
    each.name: (*get_args(each.type), each.type)[0]
    for each in fields(Record)
    if each.name not in ("arm", "settings", "log", "folder")
}


def outcome(log: list[Row], steps: int, vocab_size: int) -> Row:
    """What the rows of a metrics.jsonl say of a run of so many steps."""
    last = log[-1] if log else {"step": 0}
    final = last if last["step"] == steps else {}
    return {
        "diverged": "not_finite" in last or final.get("val_loss", 0.0) > math.log(vocab_size),
        "step": last["step"],
        "val_loss": final.get("val_loss"),
        "val_bpb": final.get("val_bpb"),
        "seconds": next((row["seconds"] for row in reversed(log) if "seconds" in row), None),
        "log": log,
    }


def compared(resolved: Asked) -> Asked:
    """The options that must match between runs of an arm. The GPU index is ignored."""
    options = DEFAULTS | resolved  # an earlier version may lack some
    options["device"] = resolved["device"].partition(":")[0]
    return {name: options[name] for name in options if name not in NOT_COMPARED}


def settings_of(run: RunFile) -> dict[str, str]:
    """The options of a run that can change its result and are not at their defaults, as flags take them.

    What comes from files has a part of their hash. The arguments of norm and placement stand behind their names.
    """
    options = compared(run["resolved"])
    if TRAITS.get(options["norm"], Traits()).per_token:
        options["micro_batch_size"] = options["batch_size"]  # micro-batches change rounding only
    settings = {name: spelled(value) for name, value in options.items()}
    for kind in ("norm", "placement"):
        if arguments := settings.pop(f"{kind}_args").replace(" ", ","):
            settings[kind] += f":{arguments}"
    if "recipe" in run["asked"]:
        settings["recipe"] = run["asked"]["recipe"]
    if "weights_from" in run:
        settings["init_from"] += f"@{digest(run['weights_from']['sha256'])[:6]}"
    # Their files may have changed what is computed.
    settings["imports"] = " ".join(sorted({f"{each['file']}@{each['sha256'][:6]}" for each in run["imports"]}))
    settings["data"] = f"{run['corpus']['name']}@{run['corpus']['hash'][:12]}"
    settings["tokenizer"] = f"{run['tokenizer']['kind']}@{run['tokenizer']['hash'][:12]}"
    others = ("val_data", "text_column", "seed", "lr")
    return {name: text for name, text in settings.items() if text != UNNAMED[name] and name not in others}


def commits_of(run: RunFile) -> str:
    """The commit with which a run was started, and others with which it was resumed. "" outside a clone."""
    commits = [each["commit"] for each in (run, *run.get("resumed", [])) if each["commit"]]
    return ", resumed at ".join(dict.fromkeys(commits))


def spelled(value: Any) -> str:
    """An option's value as a user writes it: "1" for 1.0."""
    return as_text(value).removesuffix(".0") if isinstance(value, float) else as_text(value)


UNNAMED = {name: spelled(value) for name, value in (DEFAULTS | REMOVED).items()} | {"recipe": "llama", "imports": ""}


def final_bpb(records: Iterable[Record]) -> dict[int, float]:
    """val_bpb by seed, of the runs that have ended and did not diverge."""
    return {run.seed: run.val_bpb for run in records if not run.diverged and run.val_bpb is not None}


def shown(text: str) -> str:
    """A name from a file as reports have it: on one line, and not much longer than `LONGEST`."""
    return one_line(text if len(text) <= LONGEST else f"{text[:LONGEST]}…{digest(text)[:6]}")


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """The second of each pair, by the first."""
    found = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return dict(found)


# --- the file --------------------------------------------------------------------------------------------------------


def rows_of(records: Iterable[Record]) -> list[Row]:
    """What `runs.csv` has of the records. An option is in all rows if one of them does not have its default."""
    names = dict.fromkeys(name for record in records for name in record.settings)
    rows = []
    for record in records:
        own = {"arm": record.arm.name} | dict(record.arm.factors)
        own |= {name: getattr(record, name) for name in COLUMNS}
        settings = {name: record.settings.get(name, UNNAMED[name] * record.known) for name in names}
        rows.append(own | settings | own)
    return rows


def read_csv(file: Path) -> list[Record]:
    """The records in a `runs.csv`. Columns before the learning rate are factors, and those that are not ours options.

    Earlier files lack the costs and the options. Raises ValueError, naming the file, for a column that is missing and a
    value of the wrong type.
    """
    csv.field_size_limit(MAX_SIZE)
    with file.open(newline="", encoding="utf-8-sig", errors="replace") as opened:
        reader = csv.DictReader(opened)
        columns = list(reader.fieldnames or ())
        rows = [(f"{file}, line {reader.line_num}", row) for row in reader]
    for name in ("lr", "seed", "search", "diverged", "step", "val_loss", "val_bpb"):
        require(name in columns, f"{file} lacks the column {name!r}; it is not a runs.csv of this project")
    require(rows, f"{file} has no runs")
    factors = [name for name in columns[: columns.index("lr")] if name not in ("arm", "run", "data")]
    options = [name for name in columns if name in UNNAMED and name not in (*factors, *COLUMNS)]
    records = []
    for where, row in rows:
        require(None not in (*row, *row.values()), f"{where} does not have {len(columns)} values")
        arm = Arm(tuple((name, row[name]) for name in factors) or (("name", row.get("arm", "")),))
        values = {name: _read(row[name], kind, f"{where}: {name}") for name, kind in COLUMNS.items() if row.get(name)}
        require(values.get("lr") and "seed" in values, f"{where} has no learning rate or no seed")
        settings = {name: row[name] for name in options if row[name] not in ("", UNNAMED[name])}
        require(_read(row.get("steps") or "1", int, f"{where}: steps"), f"{where} has no steps")
        records.append(Record(arm, **values, settings=settings, folder=str(file.parent)))
    return records


def _read(text: str, kind: Any, what: str) -> Any:
    """A value of type `kind`. Raises ValueError, naming `what` it is."""
    try:
        value = TRUTH[text.lower()] if kind is bool else kind(text)
        require(kind is str or 0 <= float(value) < math.inf, what)
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{what} is {text!r}, not of type {kind.__name__} or below 0") from None
    return value


# --- names -----------------------------------------------------------------------------------------------------------


def name_arms(records: list[Record]) -> tuple[list[Record], list[str]]:
    """The records with arms named by few options that tell them apart, and which other options differ.

    Factors of an ablation that do are kept. Runs that differ in nothing but their seed are an arm. A learning rate
    counts, unless it was searched for, and so does a folder, if runs of two have the same options and seed, or if the
    options of one are not known. Options that follow from a recipe, a tokenizer or a size are not returned.
    """
    searched = {record.folder for record in records if record.search}
    folders = {record.folder for record in records}
    unknown = len(folders) > 1 and not all(record.known for record in records)
    short = len({Path(folder).name for folder in folders}) == len(folders)
    given, distinct = [], set()
    for record in records:
        lossy = f"lossy ({100 * record.lost:.3g}%)" if record.lost else ""
        lr = "best" if record.folder in searched else spelled(record.lr)
        given.append(record.options | {"lr": lr, LOSSY: lossy})
        distinct.add((*sorted(given[-1].items()), record.seed))
    if unknown or len(distinct) < len(records):
        for each, record in zip(given, records, strict=True):
            each.setdefault("folder", Path(record.folder).name if short else record.folder)

    def values(*names: str) -> list[tuple[str, ...]]:
        return [tuple(each.get(name, UNNAMED.get(name, "")) for name in names) for each in given]

    def count(*names: str) -> int:
        return len(set(values(*names)))

    factors = dict.fromkeys(name for record in records for name, _ in record.arm.factors)
    order = dict.fromkeys(["recipe", "norm", "placement", "tokenizer", *FIELDS, *chain.from_iterable(given)])
    differing = [name for name in order if count(name) > 1]
    names = [name for name in {**factors, "folder": None} if name in differing]
    while count(*names) < count(*differing):
        names.append(max(differing, key=lambda name: count(*names, name)))
    names = sorted(names or factors or ["norm", "placement"], key=[*factors, *order].index)
    names = [name for name in names if name != LOSSY] + [LOSSY] * (LOSSY in differing)

    leading = [name for name in ("recipe", "tokenizer", SIZE) if name in names]
    others = []
    for name in [] if unknown else differing:
        causes = FOLLOW.get(name, [] if name in FREE else leading)
        if name not in (*names, "lr", "folder") and count(name, *causes) > count(*causes):
            others.append(name)

    arms = [Arm(tuple(zip(names, each, strict=True))) for each in values(*names)]
    return [replace(record, arm=arm) for record, arm in zip(records, arms, strict=True)], others
