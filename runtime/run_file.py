"""run.json: what a run is and what repeats it, with a checksum, so that damage is not mistaken for another setting."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from config import load_json
from norms import is_a
from runtime.run_dir import write_atomically

CHECKSUM = "sha256"  # of everything else in the file
REQUIRED = {
    "model": dict,
    "training": dict,
    "corpus": dict,
    "tokenizer": dict,
    "command": list[str],
    "versions": dict[str, str],
}


def write_run_file(path: Path, description: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(description | {CHECKSUM: _checksum(description)}, indent=2) + "\n")


def read_run_file(path: Path) -> dict[str, Any]:
    """The contents of a run.json. Raises ValueError, naming the file, if it is missing or damaged.

    Those of earlier versions have no checksum. One that was edited by hand is taken once its checksum is removed.
    """
    try:
        description = load_json(path)
        valid = is_a(description, dict) and all(is_a(description.get(name), kind) for name, kind in REQUIRED.items())
    except (OSError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"{path} is missing or damaged")
    if description.pop(CHECKSUM, None) not in (None, _checksum(description)):
        raise ValueError(f"{path} is damaged: its {CHECKSUM} differs; remove that line if you have edited the file")
    return description


def continued(earlier: dict[str, Any], description: dict[str, Any], step: int) -> dict[str, Any]:
    """The `description` of a run that is resumed at `step`, with its first command and a list of those that resumed it.

    If the machine has changed, a line on standard error says so.
    """
    if moved := changed_machine(earlier, description):
        print(f"warning: not the same bits as without the interruption: {'; '.join(moved)}", file=sys.stderr)
    imports = description["imports"]
    description |= {
        "command": earlier["command"],
        "resumed": [*earlier.get("resumed", []), {"step": step, "command": description["command"]}],
        "imports": [record for record in earlier.get("imports", []) if record not in imports] + imports,
    }
    return description | {name: earlier[name] for name in ("weights_from",) if name in earlier}


def changed_machine(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of the machine in a `run.json` may change the last digits and has changed, as "device A, now B"."""
    then, here = (
        {name: run.get(name) for name in ("device", "instruction_set")} | {"torch": run["versions"].get("torch")}
        for run in (earlier, now)
    )
    return [f"{name} {value}, now {here[name]}" for name, value in then.items() if value not in (None, here[name])]


def _checksum(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()
