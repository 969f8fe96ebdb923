"""What every package needs: types of JSON, atomic writes, one lock, lines for the user. Standard library only."""

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

try:
    import fcntl
except ImportError:  # missing on Windows: locking is skipped there
    fcntl = None  # type: ignore[assignment]

Json = dict[str, Any]  # an object of JSON
ROOT = Path(__file__).parent
DISK_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # full, over a quota or a size limit, or broken
NO_LOCKS = "the file system has no locks, so two processes that write to one folder are not noticed"
NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class Ended(Exception):
    """Ends a command with a line and an exit `code`."""

    code: int


class BadInput(Ended, ValueError):
    """What the user asked for cannot be done."""

    code = 2


class InUse(Ended):
    """Another process holds a lock."""

    code = 4


def require(condition: object, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value has the type `kind`. An int is accepted as a float, but a bool is not accepted as an int."""
    if kind is Any or type(value) is kind:
        return True
    if isinstance(kind, UnionType):
        return any(is_a(value, each) for each in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return type(value) is list and all(is_a(item, *get_args(kind)) for item in value)
    if get_origin(kind) is dict:
        of_key, of_item = get_args(kind)
        return type(value) is dict and all(is_a(key, of_key) and is_a(value[key], of_item) for key in value)
    if kind is float and type(value) is int:
        return abs(value) <= sys.float_info.max
    return False


def read_json(path: Path, kind: Any) -> Any:
    """What a JSON file holds. Raises ValueError, naming the file, unless it can be read and has the type `kind`."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is missing or damaged: {getattr(error, 'strerror', error)}") from None
    require(is_a(value, kind), f"{path} is damaged: it does not hold the expected JSON")
    return value


def write_ours(path: Path, content: Json, format: Any) -> None:
    """Write JSON for `read_ours`, with a digest and its format: a version or, in a cache, what it was made from."""
    content = {"format": format} | content
    write_atomically(path, json.dumps(content | {"sha256": digest(content)}, indent=2) + "\n")


def read_ours(path: Path, format: Any) -> Json:
    """What `write_ours` wrote. Raises ValueError, naming a file that is missing or damaged or has another format."""
    content = read_json(path, dict)
    other = f"{path} is of another version (format {content.get('format')}, not {format})"
    require(content.get("format", format) == format, f"{other}; commit {content.get('commit')} can read it")
    found = content.pop("sha256", None)
    require(found == digest(content), f"{path} is damaged or was edited; pass changed options as flags instead")
    return content


def read_cached(path: Path, format: Any) -> Json:
    """As `read_ours`, or {} for what has to be made again."""
    try:
        return read_ours(path, format)
    except ValueError:
        return {}


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """The SHA-256 of a value that JSON can store."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def one_line(message: str) -> str:
    """A message that may quote names and values from files, on one line: unprintable characters are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in message)


warned: list[str] = []  # every line of `warn`, in order


def warn(line: str) -> None:
    """Print a line on standard error, once and on rank 0."""
    if line not in warned and os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
    warned.append(line)


def if_supported(path: Path, call: Callable, *arguments: Any, otherwise: str = "") -> None:
    """Make a system call, unless the file system of `path` lacks it; a line says what holds `otherwise`."""
    try:
        call(*arguments)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            error.filename = str(path)
            raise
        if otherwise:
            warn(f"warning: {otherwise} ({error.strerror})")


@contextmanager
def describe_write_error(path: Path, size: int) -> Iterator[None]:
    """Make an OSError inside, usually from a full disk, name the file and its size in bytes."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(next(each for each in path.absolute().parents if each.exists())).free
        reason = f"{error.strerror or error}; it needs {size:,} bytes, and {free:,} are free"
        failed = OSError(f"{path} cannot be written: {reason}")  # OSError(errno, text) would print the number too
        failed.errno = error.errno
        raise failed from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file that is never seen half written, not even after a power failure.

    What UTF-8 cannot encode, as in file names, is escaped. Raises OSError like `describe_write_error`.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    part = path.with_name(path.name + ".part")
    try:
        with describe_write_error(path, len(data)):
            part.unlink(missing_ok=True)  # it could be a link
            part.write_bytes(data)
            sync(part)
            part.replace(path)
            sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a directory
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        if_supported(path, os.fsync, descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_file(path: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock `path`. If another process holds it, wait for it, or raise InUse.

    The operating system frees the lock when the process ends, however it ends.
    """
    with open(path, "a") as lock:
        if fcntl:
            try:
                if_supported(path, fcntl.flock, lock, fcntl.LOCK_EX | fcntl.LOCK_NB, otherwise=NO_LOCKS)
            except BlockingIOError:
                if not wait:
                    raise InUse(f"{path.parent} is in use by another process") from None
                print(f"waiting for another process, which holds {path}", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
