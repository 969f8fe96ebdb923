"""An index of files: what was read from them is kept for as long as none has another size or modification time."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from files import lock_file, read_json, said, warn, write_atomically


def stat_key(what: Any, files: Iterable[Path]) -> str:
    """The SHA-256, in hex, of `what` is read from files, and of the path, size and modification time of each."""
    digest = hashlib.sha256(repr(what).encode())
    for file in map(os.fsencode, files):
        stat = os.stat(file) if os.path.exists(file) else os.lstat(file)  # a broken link
        digest.update(b"%b %d %d\n" % (file, stat.st_size, stat.st_mtime_ns))
    return digest.hexdigest()


def indexed(index: Path, read: Callable[[], dict[str, Any]], verify: bool = False) -> dict[str, Any]:
    """What `read` returned when the file `index` was written, or what it returns now: without a file, or to `verify`.

    Lines that `warn` printed then are printed again.
    """
    record = None if verify else _stored(index)
    if record is None:
        index.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(index.with_suffix(".lock"), wait=True):  # ranks and runs start together
            record = None if verify else _stored(index)
            if record is None:
                before = len(said)
                record = read()
                write_atomically(index, json.dumps(record | {"said": said[before:]}))
    return record


def _stored(index: Path) -> dict[str, Any] | None:
    try:
        record = read_json(index, dict)
        for line in record["said"]:
            warn(line)
        return record
    except (ValueError, KeyError):
        return None
