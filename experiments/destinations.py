"""Checks of where a command will write, before it measures for minutes or hours."""

import os
from pathlib import Path

from config import require


def check_file(file: Path) -> None:
    """Raise ValueError if something other than a file is there, such as a device: a result would take its place."""
    require(not file.is_dir(), f"{file} is a folder; name a file for the result")
    fits = file.is_file() and not file.is_symlink()
    require(fits or not os.path.lexists(file), f"{file} is not a regular file; name another for the result")


def make_folder(flag: str, folder: Path) -> None:
    """Create the folder that `flag` names, unless it exists. Raises ValueError if it is something else."""
    require(folder.is_dir() or not os.path.lexists(folder), f"{flag} {folder} is not a folder; name another")
    folder.mkdir(parents=True, exist_ok=True)
    require(os.access(folder, os.W_OK), f"{flag} {folder}: no permission to write there")
