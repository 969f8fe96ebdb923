"""Text sources: the files behind a `--data` name, and the documents in a file."""

import gzip
import hashlib
import http.client
import json
import os
import re
import sys
import sysconfig
import urllib.request
import zlib
from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from io import BufferedIOBase
from itertools import chain
from pathlib import Path
from typing import NoReturn

from files import lock_file, one_line, require, sha256, warn, write_atomically

CHUNK_BYTES = 1 << 20
PARQUET_ROWS = 64  # rows held in memory at a time
CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of a UTF-8 character after its first
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
LONGEST_LINE = 1 << 24  # bytes
OTHER_COLUMN = "name one with --text-column; a list of messages must first be joined into one string"
OTHER_SPLIT = re.compile(r"(partial-)?(test|validation|valid|val|dev)([-.].*)?")  # its files and folders
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def find_files(name: str, cache_dir: Path, flag: str = "--data") -> list[Path]:
    """The files behind `python`, `shakespeare` or a path, in an order that is deterministic. None of them is opened."""
    if name == "python":  # source and documentation of the standard library, without its tests
        found = _walk(Path(sysconfig.get_path("stdlib")), SKIPPED_FOLDERS)
        sources = (file for file in found if file.suffix in (".py", ".txt", ".rst") and file.is_file())
        # _sysconfigdata depends on the build of the interpreter.
        return [file for file in sources if not file.name.startswith((".", "_sysconfigdata"))]
    if name == "shakespeare":
        return [_download_shakespeare(cache_dir)]
    path = Path(name)
    if path.is_dir():
        return [*_walk(path)]
    # A pipe is refused, because the text may be read again.
    require(path.is_file(), f"{flag} {name}: no such file or folder; pass python, shakespeare or a path")
    return [path]


def text_files(name: str, files: list[Path], flag: str = "--data") -> list[Path]:
    """Those of the files behind `name` that are text. A line says what is left out of a folder."""
    if name in ("python", "shakespeare"):
        return files
    path = Path(name)
    problems = defaultdict(list)
    for file in files:
        arrow = file.name == "dataset_info.json" and any(file.parent.glob("*.arrow"))
        makes = f'datasets.load_from_disk("{file.parent}").to_parquet("text.parquet")'
        require(not arrow, f"{flag} {name} holds Arrow files of the package datasets; pass what {makes} writes")
        hidden = file.name.startswith(".") and file != path
        problems["hidden" if hidden else _not_text(file)].append(file)
    taken = problems.pop("", [])
    if path.is_file():
        why = "".join(problems)
        require(taken, f"{flag} {name} is {why}, not text in UTF-8; convert it, or make JSON lines of a table")
    else:
        said = f"{flag} {name}: {len(taken)} files"
        listed = {f"left out as {why}": others for why, others in problems.items()}
        other_split = [file for file in taken if any(map(OTHER_SPLIT.fullmatch, file.relative_to(path).parts))]
        if other_split and flag == "--data":
            listed["to train on, though named like text for --val-data"] = other_split
        for what, others in listed.items():
            names = [str(file.relative_to(path)) for file in others[:3]] + ["..."] * (len(others) > 3)
            said += f"; {what}: {len(others)} ({', '.join(names)})"
        warn(one_line(said))
    if plain := [file for file in taken if _stem(file).endswith(".json") and not _is_json_lines(file)]:
        which = f"{flag} {name}: {len(plain)} .json read as one text, such as {plain[0]}"
        warn(one_line(f"{which}; convert it to JSON lines, one object a line"))
    return taken


def _not_text(path: Path) -> str:
    """Why a file is not text, or "". Like git, it looks for a NUL in the first 8 KB."""
    if not path.is_file():
        return "no regular file"
    if path.suffix.lower() == ".parquet":
        return ""
    if _stem(path).endswith((".csv", ".tsv")):
        return "CSV or TSV"
    with _open(path) as file:
        return "binary or UTF-16" if b"\0" in file.read(8192) else ""


def short_name(name: str) -> str:
    """A name for a source that is safe in a folder name."""
    file = "tinyshakespeare" if name == "shakespeare" else Path(os.path.realpath(name)).name
    stem = re.sub(r"(\.txt|\.jsonl|\.json|\.ndjson|\.parquet)?(\.gz)?$", "", file, flags=re.IGNORECASE)
    return re.sub(r"[^\w-]+", "_", stem) or "text"


def _download_shakespeare(cache_dir: Path) -> Path:
    """The path of tiny Shakespeare, downloaded to `cache_dir` unless a file with the right SHA-256 is there."""
    target = cache_dir / "tinyshakespeare.txt"
    with lock_file(cache_dir / "tinyshakespeare.lock", wait=True):  # ranks start together
        if target.is_file() and sha256(target) == SHAKESPEARE_SHA256:
            return target
        print(f"downloading {SHAKESPEARE_URL}", file=sys.stderr)
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
                text = response.read()
            right = hashlib.sha256(text).hexdigest() == SHAKESPEARE_SHA256
            require(right, "SHA-256 mismatch: not tiny Shakespeare, or incomplete")
        except (OSError, ValueError, http.client.HTTPException) as error:
            advice = f"download {SHAKESPEARE_URL} yourself and pass --data FILE, or use --data python"
            raise ValueError(f"--data shakespeare: the download failed ({one_line(str(error))}); {advice}") from None
        write_atomically(target, text)
    return target


def read_documents(paths: Iterable[Path], column: str = "text") -> Iterator[Iterator[str]]:
    """The documents of files, each an iterator of chunks of about 1 MiB.

    Each line of a file of JSON lines is a document, the string under the key `column`, and so is each row of a .parquet
    file; any other file is one document. A line says how many rows have no text (null). A ValueError names the file,
    and the line or the byte in the decompressed text.
    """
    for path in paths:
        if path.suffix.lower() == ".parquet":
            texts = _read_parquet(path, column)
        elif _is_json_lines(path):
            texts = _read_json_lines(path, column)
        else:
            yield _read_text(path)
            continue
        empty = 0
        for text in texts:
            if text is not None:
                yield _chunks(text)
            empty += text is None
        if empty:
            warn(f"{path}: rows left out, because their text is null: {empty}")


def _is_json_lines(path: Path) -> bool:
    """Whether each line of a file is a JSON object: by its name, or for .json if its first two lines are."""
    if not _stem(path).endswith(".json"):
        return _stem(path).endswith((".jsonl", ".ndjson", ".jsonlines"))
    with _open(path) as file:
        lines = [file.readline(LONGEST_LINE) for _ in range(2)]
    try:
        return all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def _stem(path: Path) -> str:
    """The name in lower case, without .gz."""
    return path.name.lower().removesuffix(".gz")


def _chunks(text: str) -> Iterator[str]:
    for start in range(0, len(text), CHUNK_BYTES):
        yield text[start : start + CHUNK_BYTES]


def _read_text(path: Path) -> Iterator[str]:
    with _open(path) as file:
        rest = file.read(len(BOM_UTF8)).removeprefix(BOM_UTF8)
        offset = file.tell() - len(rest)
        try:
            while data := file.read(CHUNK_BYTES):
                data = rest + data
                # Without a line end, the last character is held back: the rest of it may be missing.
                end = data.rfind(b"\n") + 1 or max(len(data.rstrip(CONTINUATION)) - 1, 0)
                yield data[:end].decode()
                offset, rest = offset + end, data[end:]
            if rest:
                yield rest.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 at byte {offset + error.start}; convert or remove it") from None


def _read_json_lines(path: Path, column: str) -> Iterator[str | None]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            row = None
            try:
                row = json.loads(line)
                text = row[column]
                if text is not None:
                    text.encode()
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                problem = "is not a JSON object in UTF-8"
                if isinstance(row, dict):
                    keys = {key: type(value).__name__ for key, value in [*row.items()][:9]}
                    problem = f'has no valid string under "{column}", but {keys}; {OTHER_COLUMN}'
                raise ValueError(f"{path}: line {number} {problem}") from None
            yield text


def _read_parquet(path: Path, column: str) -> Iterator[str | None]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: Parquet files need the package pyarrow: pip install pyarrow") from None
    try:
        # With a buffer it reads a page at a time, not a whole row group.
        with pyarrow.parquet.ParquetFile(path, buffer_size=CHUNK_BYTES, pre_buffer=False) as file:
            columns = {field.name: str(field.type) for field in file.schema_arrow}
            if not re.match(r"(dictionary<values=)?(large_)?string|null", columns.get(column, "")):
                raise ValueError(f'{path}: no column "{column}" of strings, but {columns}; {OTHER_COLUMN}')
            batches = file.iter_batches(PARQUET_ROWS, columns=[column], use_threads=False)
            yield from chain.from_iterable(batch[column].to_pylist() for batch in batches)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError, KeyError) as error:  # a key that two columns have
        raise ValueError(f"{path}: not a valid Parquet file: {one_line(str(error))}") from None


@contextmanager
def _open(path: Path) -> Iterator[BufferedIOBase]:
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ValueError(f"{path}: not a valid gzip file") from None


def _walk(root: Path, skip: Set[str] = frozenset()) -> Iterator[Path]:
    """The files below a folder, and its hidden folders, in sorted order. Links are followed, each real folder once."""
    seen = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_raise):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        hidden = [name for name in folders if name.startswith(".")]
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files + hidden))


def _raise(error: OSError) -> NoReturn:
    raise error
