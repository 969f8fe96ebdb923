"""Where text comes from: the files behind a name, and the documents in a file."""

import gzip
import hashlib
import http.client
import json
import os
import re
import sysconfig
import tempfile
import urllib.request
import zlib
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from tqdm import tqdm

CHUNK_BYTES = 1 << 20
LONGEST_LINE = 32 << 20  # of a .jsonl, which has to be held whole to be parsed

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

NOT_OUR_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def find_files(name: str, cache_dir: Path) -> list[Path]:
    """The files that `python`, `shakespeare` or a path stands for, in an order that does not depend on the machine.

    Of a folder these are all files in it and below, except what begins with a dot and what holds a NUL among its
    first 8192 bytes, which is how git tells binary files from text. Raises ValueError where there are none.
    """
    if name == "python":
        return standard_library()
    if name == "shakespeare":
        return [download_shakespeare(cache_dir)]
    path = Path(name)
    if path.is_dir():
        files = [file for file in _walk(path) if _looks_like_text(file)]
        if not files:
            raise ValueError(f"--data {name}: no text files in that folder")
        return files
    if not path.is_file():
        raise ValueError(f"--data {name}: no such file or folder, and neither python nor shakespeare")
    return [path]


def short_name(name: str) -> str:
    """What to call a source in the name of a folder."""
    if name == "shakespeare":
        return "tinyshakespeare"
    return re.sub(r"[^\w-]+", "_", re.sub(r"(\.txt|\.jsonl)?(\.gz)?$", "", Path(name).resolve().name)) or "text"


def standard_library() -> list[Path]:
    """Source and documentation of the running interpreter's standard library, without its tests.

    Left out too: what was generated when this interpreter was built, and the odd file that is not UTF-8.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in _walk(root, leave_out=NOT_OUR_TEXT)
        if file.suffix in (".py", ".txt", ".rst") and not file.name.startswith("_sysconfigdata") and _is_utf8(file)
    ]
    if not files:
        raise ValueError(f"--data python: this interpreter keeps no source in {root}; give --data a file instead")
    return files


def download_shakespeare(cache_dir: Path) -> Path:
    """Tiny Shakespeare in `cache_dir`, fetched unless it is there already and whole."""
    target = cache_dir / "tinyshakespeare.txt"
    if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == SHAKESPEARE_SHA256:
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix="download-") as beside:
        part = Path(beside, "part")
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response, open(part, "wb") as file:
                size = int(response.headers.get("Content-Length", 0)) or None
                with tqdm(total=size, unit="B", unit_scale=True, desc="downloading", disable=None) as bar:
                    while piece := response.read(1 << 16):
                        file.write(piece)
                        digest.update(piece)
                        bar.update(len(piece))
            if digest.hexdigest() != SHAKESPEARE_SHA256:
                raise ValueError("what came is not tiny Shakespeare, or not all of it")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ValueError(
                f"--data shakespeare: the download failed ({' '.join(str(error).split())}); "
                f"fetch {SHAKESPEARE_URL} by hand and pass --data FILE, or use --data python"
            ) from None
        part.replace(target)
    return target


def read_documents(path: Path) -> Iterator[Iterator[str]]:
    """The documents of a file, each in chunks of about 1 MiB: a line's `text` each for .jsonl, otherwise the whole.

    Raises ValueError naming the file, and the line or byte offset (of the text, if gzipped) where it is not as it
    should be.
    """
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        yield from map(_in_chunks, _texts(path))
    else:
        yield _chunks(path)


def _in_chunks(text: str) -> Iterator[str]:
    for start in range(0, len(text), CHUNK_BYTES):
        yield text[start : start + CHUNK_BYTES]


def _chunks(path: Path) -> Iterator[str]:
    with _open(path) as file:
        offset, rest = 0, b""
        while piece := file.read(CHUNK_BYTES):
            whole = rest + piece
            end = whole.rfind(b"\n") + 1 or _last_character(whole)
            yield _decode(whole[:end], path, offset)
            offset, rest = offset + end, whole[end:]
        if rest:
            yield _decode(rest, path, offset)


def _last_character(text: bytes) -> int:
    """Where the last character begins, for it may go on beyond `text`."""
    start = len(text) - 1
    while start > len(text) - 4 and start > 0 and text[start] & 0xC0 == 0x80:
        start -= 1
    return start


def _texts(path: Path) -> Iterator[str]:
    with _open(path) as file:
        number, offset = 0, 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE:
                raise ValueError(f"{path}: line {number} is longer than {LONGEST_LINE >> 20} MiB; make it a text file")
            content = _decode(line, path, offset)
            offset += len(line)
            if content.isspace():
                continue
            try:
                text = json.loads(content)["text"]
                text.encode()
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise ValueError(f'{path}: line {number} is not a JSON object with text under "text"') from None
            yield text


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {offset + error.start}; convert it to UTF-8") from None


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            yield cast(BinaryIO, file)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ValueError(f"{path}: not gzipped, or damaged or cut short") from None


def _walk(root: Path, leave_out: Set[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in leave_out and not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _looks_like_text(path: Path) -> bool:
    with _open(path) as file:
        return b"\0" not in file.read(8192)


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return False
    return True
