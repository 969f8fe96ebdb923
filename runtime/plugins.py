"""Norms and placements from files outside the repository: `--import mynorm.py`, which runs a file that is named."""

import argparse
import copy
import shlex
import sys
import traceback
from collections.abc import Iterable
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from config import ModelConfig
from files import ROOT, Json, one_line, require, sha256, warn
from machine import distributed
from machine.process import bad_input
from norms import KINDS, TRAITS, build_norm
from norms.placement import PLACEMENTS

IMPORTED: dict[Path, Json] = {}  # what run.json and config.json say about each imported file


def import_first(arguments: list[str]) -> None:
    """Import the files that --import names in `arguments`, so that the other flags know their norms."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--import", dest="imports", action="append", default=[], nargs="?", const="")
    with bad_input(), distributed.raise_on_all_ranks():
        import_files(scan.parse_known_args(arguments)[0].imports)


def import_files(names: Iterable[str]) -> None:
    """Run each of the Python files `names`, once, and record what it registers. A ValueError names file and line."""
    for name in names:
        path = Path(name).expanduser().resolve()
        require(path.is_file(), f"--import {name}: no such file; name a Python file, such as mynorm.py")
        content = sha256(path)
        if path in IMPORTED:
            require(IMPORTED[path]["sha256"] == content, f"--import {name} has changed; restart Python to use it")
            continue
        stems = [other.stem for other in IMPORTED]
        require(path.stem not in stems, f"--import {name}: another imported file has this name; rename one")
        kinds, known, module = len(KINDS), len(PLACEMENTS), ModuleType(f"imported_{path.stem}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # torch.compile looks for classes there
        try:
            SourceFileLoader(module.__name__, str(path)).exec_module(module)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            line = lines[-1] if lines else getattr(error, "lineno", 1)
            raise ValueError(f"--import {name}, line {line}: {type(error).__name__}: {error}") from None
        norms, placements = [*KINDS][kinds:], [*PLACEMENTS][known:]
        require(norms or placements, f"--import {name} registers no norm and no placement; see CONTRIBUTING.md")
        IMPORTED[path] = {"file": path.name, "sha256": content, "norms": norms, "placements": placements}


def import_flags() -> list[str]:
    """The flags with which another command imports the same files."""
    return [part for path in IMPORTED for part in ("--import", str(path))]


def command_to_type(script: str, *arguments: str) -> str:
    """A command of this project that the user can paste where this one was started, with the same imports."""
    path = script if Path.cwd() == ROOT else ROOT / script
    return shlex.join(["python", str(path), *arguments, *import_flags()])


@torch.no_grad()
def check_imported_norm(config: ModelConfig, device: torch.device) -> None:
    """Raise ValueError if an imported norm would give wrong results, or could not be loaded from a checkpoint."""
    if not any(config.norm in record["norms"] for record in import_records()):
        return
    named, traits = f"--norm {config.norm}", TRAITS[config.norm]
    make = partial(build_norm, config.norm, config.dim, "attention", **config.norm_args)
    norm = make()
    x = torch.arange(16.0 * config.dim, device=device).sin().view(2, 8, -1)  # different values
    changed = torch.cat([x[:, :-1], x[:, -1:] + 1], dim=1)
    for training in (True, False):
        y, later, first = (_apply(norm.train(training), tokens, named) for tokens in (x, changed, x[:1]))
        causal = torch.equal(y[:, :-1], later[:, :-1]) or (training and not traits.causal_in_training)
        require(causal, f"{named} lets a token see later tokens")
        alone = torch.allclose(y[:1], first, 1e-4, 1e-4) or not traits.per_token  # CUDA sums other shapes otherwise
        require(alone, f"{named} mixes the sequences of a batch; register it with per_token=False")
    try:
        state = load(save(norm.state_dict()))
        with torch.device("meta"):  # checkpoints are loaded this way
            loaded = make().eval()
        loaded.load_state_dict(state, assign=True)
        same = torch.equal(_apply(loaded, x, named), y)
    except (RuntimeError, ValueError):
        same = False
    tensors = "contiguous parameters and persistent buffers of its own, none float64"
    valid = same and all(tensor.dtype != torch.float64 for tensor in state.values())
    require(valid, f"{named} could not be loaded from a checkpoint: its tensors must be {tensors}")


def _apply(norm: nn.Module, tokens: Tensor, named: str) -> Tensor:
    """What a copy of the norm makes of the tokens, with the same dropout each time."""
    given = tokens.clone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        y = copy.deepcopy(norm).to(tokens.device)(given)
    require(torch.equal(given, tokens), f"{named} changes its input in place; the stream needs it")
    shaped = isinstance(y, Tensor) and y.shape == tokens.shape and y.dtype == tokens.dtype
    require(shaped, f"{named} must return a tensor with the shape and dtype of its input")
    return y.nan_to_num()


def import_records() -> list[Json]:
    """What was imported: name and SHA-256 of each file, and what it registered. A file may change anything else too."""
    return [*IMPORTED.values()]


def check_imports(records: list[Json], added: bool = False) -> list[str]:
    """A line for each imported file that differs from that in a model's `records`, or with `added` is not in them.

    Raises ValueError if one of theirs is not imported: it may have changed anything.
    """
    here = {record["file"]: record["sha256"] for record in import_records()}
    there = {record["file"]: record["sha256"] for record in records}  # the latest of each file
    new = [file for file, content in here.items() if file not in there and content not in there.values()]
    lines = [f"this run was trained without {file}" for file in new if added]
    for file, content in there.items():
        if content not in here.values():
            require(file in here, f"this run uses {file}: add --import PATH/{file}")
            lines.append(f"this run was trained with another {file} (SHA-256 {content[:8]}...)")
    return lines


def warn_of_imports(records: list[Json], added: bool) -> None:
    """`check_imports`, and print what differs, once per process."""
    for line in check_imports(records, added):
        warn(f"warning: {one_line(line)}")
