"""run.json: what a run is and what repeats it, with a checksum, so that damage is not mistaken for another setting."""

import hashlib
import json
from pathlib import Path
from typing import Any

from config import load_json
from norms import is_a
from runtime.run_dir import write_atomically

CHECKSUM = "sha256"  # of everything else in the file
REQUIRED = {"model": dict, "training": dict, "corpus": dict, "tokenizer": dict, "command": list[str]}


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


def _checksum(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()
