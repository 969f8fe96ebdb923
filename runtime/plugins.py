"""Norms and placements from files outside the repository: `--import mynorm.py`.

A file is run only if the user names it. A run records the files it was started with and keeps copies to look at, which
are never run. To use the run later, its files are named again.
"""

import argparse
import hashlib
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.abc import InspectLoader
from importlib.util import decode_source, module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from config import require
from files import is_a, one_line
from norms import KINDS, TRAITS
from norms.placement import PLACEMENTS
from runtime import distributed

TABLES: tuple[dict[str, Any], ...] = (KINDS, TRAITS, PLACEMENTS)  # what a file adds to
CHOICES: dict[str, dict[str, Any]] = {"norm": KINDS, "placement": PLACEMENTS}
COPIES = "imports"  # folder in that of a run
RECORD = {"file": str, "sha256": str, "norms": list[str], "placements": list[str]}  # in run.json and config.json

Record = dict[str, Any]


@dataclass(frozen=True)
class Plugin:
    """A file that was imported, and the names it registered."""

    path: Path
    source: bytes
    norms: list[str]
    placements: list[str]

    @property
    def record(self) -> Record:
        digest = hashlib.sha256(self.source).hexdigest()
        return {"file": self.path.name, "sha256": digest, "norms": self.norms, "placements": self.placements}


class SourceLoader(InspectLoader):
    """Imports a file from its source, the bytes that are recorded, and never from a cached .pyc."""

    def __init__(self, path: Path):
        self.path = path

    def get_source(self, fullname: str) -> str:
        return decode_source(self.source)

    def get_code(self, fullname: str) -> CodeType:
        self.source = self.path.read_bytes()
        return self.source_to_code(self.source, str(self.path))


IMPORTED: dict[Path, Plugin] = {}


class NotImported(ValueError):
    """A model needs a file that was not imported."""


# --- importing -------------------------------------------------------------------------------------------------------


def add_import_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="FILE.py",
        help="Python file that registers norms or placements; may be repeated",
    )


def import_first(parser: argparse.ArgumentParser, arguments: list[str] | None) -> None:
    """Add `--import` to `parser` and import the files that `arguments` name, so that the other flags know their norms.

    A file that cannot be imported ends the command, on all ranks.
    """
    add_import_flag(parser)
    scan = argparse.ArgumentParser(add_help=False)
    scan.add_argument("--import", dest="imports", action="append", nargs="?", default=[])  # `parser` checks for a value
    try:
        with distributed.raise_on_all_ranks():
            import_files(filter(None, scan.parse_known_args(arguments)[0].imports))
    except (ValueError, OSError) as error:
        parser.error(str(error))


def import_files(names: Iterable[str]) -> None:
    """Run each of the Python files `names`, once, and take what it registers.

    Raises ValueError, naming the file and where possible the line, for a file that is missing, fails, registers
    nothing, or registers a name that exists already. Nothing of such a file stays registered.
    """
    for name in names:
        path = Path(name).resolve()
        if path not in IMPORTED:
            IMPORTED[path] = _import_file(name, path)


def _import_file(name: str, path: Path) -> Plugin:
    require(path.is_file(), f"--import {name}: no such file; name a Python file, such as mynorm.py")
    same_name = path.name in (other.name for other in IMPORTED)
    require(not same_name, f"--import {name}: another file of this name is imported too; rename one")
    before = [dict(table) for table in TABLES]
    loader = SourceLoader(path)
    spec = spec_from_loader(f"imported_{path.stem}", loader)
    assert spec
    module = module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where pickle and torch.compile look for its classes
    try:
        loader.exec_module(module)
        source = loader.source
        norms, _, placements = (_added(table, earlier) for table, earlier in zip(TABLES, before, strict=True))
        require(bool(norms or placements), "registers no norm and no placement; see CONTRIBUTING.md")
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        for table, earlier in zip(TABLES, before, strict=True):
            table.clear()
            table.update(earlier)
        raise ValueError(f"--import {name}{_explained(error, path)}") from None
    return Plugin(path, source, norms, placements)


def _added(table: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """The names that were added. Raises ValueError if another was replaced, or if one is not safe in a file name."""
    for name, value in earlier.items():
        require(table.get(name) is value, f"replaces {name!r}, which exists already; choose another name")
    added = [name for name in table if name not in earlier]
    for name in added:
        require(bool(re.fullmatch(r"[\w-]+", name)), f"the name {name!r} must consist of letters, digits, - and _")
    return added


def _explained(error: BaseException, path: Path) -> str:
    """What happened at which line of the file, for the end of one line."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    message = str(error)
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines, message = [error.lineno], error.msg
    where = f", line {lines[-1]}" if lines else ""
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{where}: {kind}{' '.join(message.split())}"


def error_line(error: BaseException) -> str | None:
    """One line about an error that an imported file raised, itself or by a call of torch, or None for any other."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path in IMPORTED:
            return frame.filename + _explained(error, path)
        if not path.is_relative_to(Path(torch.__file__).parent):
            break
    return None


# --- what a run records, and who uses it later -----------------------------------------------------------------------


def import_records() -> list[Record]:
    """What was imported: name and SHA-256 of each file, and what it registered."""
    return [plugin.record for plugin in IMPORTED.values()]


def import_flags() -> list[str]:
    """The flags with which another command imports the same files."""
    return [part for path in IMPORTED for part in ("--import", str(path))]


def keep_copies(run: Path) -> None:
    """Write the imported files to the folder of a run, named after their contents. These copies are never run."""
    for path, plugin in IMPORTED.items():
        copy = run / COPIES / f"{path.stem}-{plugin.record['sha256'][:8]}.py"
        copy.parent.mkdir(exist_ok=True)
        copy.unlink(missing_ok=True)  # it may be a link
        copy.write_bytes(plugin.source)


def check_imports(description: dict[str, Any], source: Path) -> list[str]:
    """A line for each file that differs from the one this model was trained with.

    `description` has the "model" and the "imports" of the run.json or config.json `source`. Raises NotImported, naming
    the file, if the model's norm or placement is not registered, and ValueError if the record is damaged.
    """
    records, lines = description.get("imports", []), []
    valid = is_a(records, list[dict]) and all(is_a(each.get(name), RECORD[name]) for each in records for name in RECORD)
    require(valid, f"{source}: 'imports' is damaged")
    hashes = {record["sha256"] for record in import_records()}
    for file, record in {record["file"]: record for record in records}.items():  # the latest version of each file
        names = {name: description["model"].get(name) for name in ("norm", "placement")}
        used = {option: name for option, name in names.items() if name in record[f"{option}s"]}
        if any(name not in CHOICES[option] for option, name in used.items()):
            raise NotImported(f"{source.parent}: this run uses {file}: add --import PATH/{file}")
        if used and record["sha256"] not in hashes:
            lines.append(f"this run was trained with another {file} (SHA-256 {record['sha256'][:8]}...)")
    return lines


def warn_of_imports(description: dict[str, Any], source: Path) -> None:
    """`check_imports`, and print what differs, once per process."""
    for line in check_imports(description, source):
        if distributed.is_main():
            _warn(line)


@cache
def _warn(line: str) -> None:
    print(f"warning: {one_line(line)}", file=sys.stderr)
