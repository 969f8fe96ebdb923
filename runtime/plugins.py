"""Norms and placements from files outside the repository: `--import mynorm.py`.

A file is run only if the user names it. A run keeps copies of its files to look at, which are never run.
"""

import argparse
import copy
import shlex
import sys
import traceback
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from config import ModelConfig
from files import one_line, require, sha256, warn
from machine import distributed
from machine.process import bad_input
from norms import KINDS, TRAITS, build_norm
from norms.placement import PLACEMENTS

ROOT = Path(__file__).parents[1]
IMPORTED: dict[Path, tuple[dict[str, Any], bytes]] = {}  # the record, for run.json and config.json, and the source


def import_first(parser: argparse.ArgumentParser, arguments: list[str] | None) -> None:
    """Add `--import` to `parser` and import the files of `arguments`, so that the other flags know their norms."""
    flag: dict[str, Any] = {"dest": "imports", "action": "append", "default": [], "metavar": "FILE.py"}
    parser.add_argument("--import", help="Python file that registers norms or placements; may be repeated", **flag)
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--import", nargs="?", **flag)  # `parser` checks for a value
    with bad_input(), distributed.raise_on_all_ranks():
        import_files(filter(None, scan.parse_known_args(arguments)[0].imports))


def import_files(names: Iterable[str]) -> None:
    """Run each of the Python files `names`, once, and record what it registers. A ValueError names file and line."""
    for name in names:
        path = Path(name).resolve()
        if path in IMPORTED:
            require(IMPORTED[path][1] == path.read_bytes(), f"--import {name} has changed; restart Python to use it")
            continue
        require(path.is_file(), f"--import {name}: no such file; name a Python file, such as mynorm.py")
        module = ModuleType(f"imported_{path.stem}")
        require(module.__name__ not in sys.modules, f"--import {name}: another imported file has this name; rename one")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # torch.compile looks for classes there
        earlier: list[Mapping[str, Any]] = [{**KINDS}, {**PLACEMENTS}]
        owners = [(owner, {**vars(owner)}) for owner in definitions()]
        source = path.read_bytes()
        try:
            SourceFileLoader(module.__name__, str(path)).exec_module(module)
        except (Exception, SystemExit) as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            line = lines[-1] if lines else getattr(error, "lineno", 1)
            raise ValueError(f"--import {name}, line {line}: {type(error).__name__}: {error}") from None
        tables: list[Mapping[str, Any]] = [KINDS, PLACEMENTS]
        pairs = list(zip(tables, earlier, strict=True))
        norms, placements = ([name for name in table if name not in before] for table, before in pairs)
        require(norms or placements, f"--import {name} registers no norm and no placement; see CONTRIBUTING.md")
        changes = sorted(
            f"{owner.__name__}.{name}"
            for owner, was in owners
            for name, value in vars(owner).items()
            if value is not was.get(name) and (name in was or isinstance(value, FunctionType))
        )
        changes += [name for table, before in pairs for name in before if table.get(name) is not before[name]]
        record = {"file": path.name, "sha256": sha256(path), "norms": norms, "placements": placements}
        IMPORTED[path] = record | {"changes": changes}, source


def definitions() -> set[Any]:
    """What decides what a model computes: model.py and the modules of norms/, and their classes."""
    modules = {module for name, module in sys.modules.items() if name.partition(".")[0] in ("model", "norms")}
    found = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return modules | {value for value in found if sys.modules.get(value.__module__) in modules}


@torch.no_grad()
def check_imported_norm(config: ModelConfig, device: torch.device) -> None:
    """Raise ValueError if an imported norm would give wrong results, or could not be loaded from a checkpoint."""
    if not any(config.norm in record["norms"] for record in import_records()):
        return
    make = partial(build_norm, config.norm, config.dim, "attention", **config.norm_args)
    norm, other = make(), make().state_dict()
    unsaved = f"--norm {config.norm} could not be loaded from a checkpoint: its tensors must be"
    for name, tensor in norm.state_dict().items():
        # ModelConfig made the first norm on the meta device, with what is shared.
        shared = tensor.is_meta or (tensor.numel() and tensor.data_ptr() == other[name].data_ptr())
        require(not shared, f"{unsaved} made for each site, but all have the same {name}")
    norm.to(device)
    x = torch.ones(2, 8, config.dim, device=device).cumsum(1).cumsum(2).sin()  # values that differ
    changed = x.clone()
    changed[:, -1] += 1

    def apply(norm: nn.Module, tokens: Tensor, training: bool) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same dropout
            given = tokens.clone()
            y = copy.deepcopy(norm).train(training)(given)
        require(torch.equal(given, tokens), f"--norm {config.norm} changes its input in place; the stream needs it")
        return y

    traits = TRAITS[config.norm]
    for training in (True, False):
        y, after = apply(norm, x, training), apply(norm, changed, training)
        same = isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype
        require(same, f"--norm {config.norm} must return a tensor with the shape and dtype of its input")
        causal = torch.equal(y[:, :-1].nan_to_num(), after[:, :-1].nan_to_num())
        allowed = causal or (training and not traits.causal_in_training)
        require(allowed, f"--norm {config.norm} lets a token see later tokens")
        alone = torch.equal(y[:1].nan_to_num(), apply(norm, x[:1], training).nan_to_num())
        advice = "register it with per_token=False"
        require(alone or not traits.per_token, f"--norm {config.norm} mixes the sequences of a batch; {advice}")
    try:
        state = load(save(norm.state_dict()))
        with torch.device("meta"):  # as checkpoints are loaded
            loaded = make()
        loaded.load_state_dict(state, assign=True)
        same = torch.equal(apply(loaded.to(device), x, False).nan_to_num(), y.nan_to_num())
        kept = same and all(tensor.dtype != torch.float64 for tensor in state.values())
    except (RuntimeError, ValueError):
        kept = False
    require(kept, f"{unsaved} contiguous parameters and persistent buffers, none shared or float64")


def import_records() -> list[dict[str, Any]]:
    """What was imported: name and SHA-256 of each file, and what it registered."""
    return [record for record, _ in IMPORTED.values()]


def import_flags() -> list[str]:
    """The flags with which another command imports the same files."""
    return [part for path in IMPORTED for part in ("--import", str(path))]


def command_to_type(script: str, *arguments: str) -> str:
    """A command of this project that the user can paste where this one was started, with the same imports."""
    path = script if Path.cwd() == ROOT else str(ROOT / script)
    return shlex.join(["python", path, *arguments, *import_flags()])


def keep_copies(run: Path) -> None:
    """Write the imported files to the folder of a run, named after their contents. These copies are never run."""
    for path, (record, source) in IMPORTED.items():
        copy = run / "imports" / f"{path.stem}-{record['sha256'][:8]}.py"
        copy.parent.mkdir(exist_ok=True)
        copy.unlink(missing_ok=True)  # it may be a link
        copy.write_bytes(source)


def check_imports(records: list[dict[str, Any]], options: Mapping[str, Any]) -> list[str]:
    """A line for each file that differs from those with which a model was trained.

    `records` and `options` are those of its run.json or config.json. Raises ValueError, naming the file, if it is not
    imported and the model needs its norm, placement or changes.
    """
    lines, here = [], {record["file"]: record for record in import_records()}
    hashes = {record["sha256"] for record in here.values()}
    norm, placement = options.get("norm"), options.get("placement")
    there = {record["file"]: record for record in records}  # the latest of each file
    for file, record in there.items():
        if record["sha256"] in hashes:
            continue
        used = ({norm} & {*record["norms"]}) | ({placement} & {*record["placements"]})
        missing = used - {*KINDS, *PLACEMENTS} or (record.get("changes") and file not in here)
        require(not missing, f"this run uses {file}: add --import PATH/{file}")
        if used or file in here:
            lines.append(f"this run was trained with another {file} (SHA-256 {record['sha256'][:8]}...)")
        else:
            lines.append(f"this run was trained with {file}, which is not imported now: add --import PATH/{file}")
    for file in here.keys() - there.keys():
        if here[file]["changes"]:
            lines.append(f"this run was trained without {file}, which changes {', '.join(here[file]['changes'])}")
    return lines


def warn_of_imports(records: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
    """`check_imports`, and print what differs, once per process."""
    for line in check_imports(records, options):
        warn(f"warning: {one_line(line)}")
