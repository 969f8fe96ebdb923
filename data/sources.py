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
from collections.abc import Iterator, Set
from contextlib import contextmanager
from io import BufferedIOBase
from itertools import chain
from pathlib import Path

from files import lock_file, one_line, sha256, write_atomically

CHUNK_BYTES = 1 << 20
PARQUET_ROWS = 64  # that are held in memory at a time
CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of a UTF-8 character after its first
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def find_files(name: str, cache_dir: Path) -> list[Path]:
    """The files behind `python`, `shakespeare` or a path, in an order that is deterministic.

    A folder is searched recursively. Names that begin with a dot are skipped, and so are binary files other than
    .parquet: like git, it looks for a NUL in the first 8 KB. Raises ValueError if there is no such file.
    """
    if name == "python":
        return _standard_library()
    if name == "shakespeare":
        return [_download_shakespeare(cache_dir)]
    path = Path(name)
    if path.is_dir():
        return [file for file in _walk(path) if file.suffix == ".parquet" or _looks_like_text(file)]
    if not path.is_file():  # the text is read twice, so a pipe does not do
        raise ValueError(f"--data {name}: no such file or folder; pass python, shakespeare or a path")
    return [path]


def short_name(name: str) -> str:
    """A name for a source that is safe in a folder name."""
    file = "tinyshakespeare" if name == "shakespeare" else Path(name).resolve().name
    stem = re.sub(r"(\.txt|\.jsonl|\.parquet)?(\.gz)?$", "", file)
    return re.sub(r"[^\w-]+", "_", stem) or "text"


def _standard_library() -> list[Path]:
    """The source and documentation of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = (file for file in _walk(root, SKIPPED_FOLDERS) if file.suffix in (".py", ".txt", ".rst"))
    files = [file for file in sources if not file.name.startswith("_sysconfigdata")]  # which depends on the build
    if not files:
        raise ValueError(f"--data python: no standard library source in {root}; pass --data FILE instead")
    return files


def _download_shakespeare(cache_dir: Path) -> Path:
    """The path of tiny Shakespeare, downloaded to `cache_dir` unless a file with the right SHA-256 is there."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    target = cache_dir / "tinyshakespeare.txt"
    with lock_file(cache_dir / "tinyshakespeare.lock", wait=True):  # ranks start together
        if target.is_file() and sha256(target) == SHAKESPEARE_SHA256:
            return target
        print(f"downloading {SHAKESPEARE_URL}", file=sys.stderr)
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
                text = response.read()
            if hashlib.sha256(text).hexdigest() != SHAKESPEARE_SHA256:
                raise ValueError("SHA-256 mismatch: not tiny Shakespeare, or incomplete")
        except (OSError, ValueError, http.client.HTTPException) as error:
            advice = f"download {SHAKESPEARE_URL} yourself and pass --data FILE, or use --data python"
            raise ValueError(f"--data shakespeare: the download failed ({one_line(str(error))}); {advice}") from None
        write_atomically(target, text)
    return target


def read_documents(path: Path) -> Iterator[Iterator[str]]:
    """The documents of a file, each an iterator of chunks of about 1 MiB.

    Each line of a .jsonl file is a document, the string under "text", and so is each row of a .parquet file, the string
    in the column "text"; any other file is one document. Raises ValueError that names the file and the line, the row or
    the byte offset of the error, counted in the decompressed text.
    """
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        yield from map(_chunks, _read_jsonl(path))
    elif path.suffix == ".parquet":
        yield from map(_chunks, _read_parquet(path))
    else:
        yield _read_text(path)


def _chunks(text: str) -> Iterator[str]:
    for start in range(0, len(text), CHUNK_BYTES):
        yield text[start : start + CHUNK_BYTES]


def _read_text(path: Path) -> Iterator[str]:
    with _open(path) as file:
        offset, rest = 0, b""
        while data := file.read(CHUNK_BYTES):
            data = rest + data
            # Without a line end, the last character is held back: the rest of it may be missing.
            end = data.rfind(b"\n") + 1 or max(len(data.rstrip(CONTINUATION)) - 1, 0)
            yield _decode(data[:end], path, offset)
            offset, rest = offset + end, data[end:]
        if rest:
            yield _decode(rest, path, offset)


def _read_jsonl(path: Path) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)["text"]
                text.encode()
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                wanted = 'a JSON object with a string under "text", in UTF-8'
                raise ValueError(f"{path}: line {number} is not {wanted}") from None
            yield text


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: Parquet files need the package pyarrow: pip install pyarrow") from None
    try:
        # With a buffer it reads a page at a time, not a whole row group.
        with pyarrow.parquet.ParquetFile(path, buffer_size=CHUNK_BYTES, pre_buffer=False) as file:
            columns = {field.name: str(field.type) for field in file.schema_arrow}
            if columns.get("text") not in ("string", "large_string"):
                raise ValueError(f'{path}: no column "text" of strings; the columns are {columns}')
            batches = file.iter_batches(PARQUET_ROWS, columns=["text"], use_threads=False)
            for number, text in enumerate(chain.from_iterable(batch["text"].to_pylist() for batch in batches), 1):
                if text is None:
                    raise ValueError(f"{path}: the text of row {number} is null")
                yield text
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: not a valid Parquet file: {one_line(str(error))}") from None


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {offset + error.start}; convert or remove it") from None


@contextmanager
def _open(path: Path) -> Iterator[BufferedIOBase]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ValueError(f"{path}: not a valid gzip file") from None


def _walk(root: Path, skip: Set[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file() and not name.startswith("."):
                yield path


def _looks_like_text(path: Path) -> bool:
    with _open(path) as file:
        return b"\0" not in file.read(8192)
