"""Which files a `--data` name finds, how they are read, and how invalid files are refused."""

import gzip
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data import sources
from data.sources import find_files, read_documents, short_name

CHUNK = sources.CHUNK_BYTES
ROOT = Path(__file__).parents[2]


def text_of(path: Path) -> list[str]:
    return ["".join(document) for document in read_documents(path)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_text_file_is_one_document_with_every_byte_kept(tmp_path):
    text = "\ufeffone\r\ntwo\rthree\n\n\0 é\u2028"
    assert text_of(write(tmp_path / "a.txt", text)) == [text]
    assert text_of(write(tmp_path / "a.txt.gz", gzip.compress(text.encode()))) == [text]


@pytest.mark.parametrize("unit", ["x" * 79 + "\n", "é", "a" + "😀" * 1000, "ab\n" + "語" * (CHUNK // 2)])
def test_long_files_are_chunked_without_splitting_characters(tmp_path, unit):
    text = unit * (3 * CHUNK // len(unit.encode()) + 1)
    chunks = [chunk for document in read_documents(write(tmp_path / "long", text)) for chunk in document]
    assert "".join(chunks) == text
    assert len(chunks) > 2 and max(len(chunk.encode()) for chunk in chunks) <= 2 * CHUNK
    if unit.endswith("x\n"):
        assert all(chunk.endswith("\n") for chunk in chunks)


def test_jsonl_has_one_document_per_line(tmp_path):
    texts = ["one\ntwo", "", "\u2028 é", "x" * (CHUNK + 5)]
    lines = "\n\n".join(json.dumps({"id": 1, "text": text}) for text in texts)
    assert text_of(write(tmp_path / "a.jsonl", lines)) == texts
    assert text_of(write(tmp_path / "a.jsonl.gz", gzip.compress(lines.encode()))) == texts
    documents = list(read_documents(tmp_path / "a.jsonl"))
    assert ["".join(document) for document in documents] == texts, "documents must not depend on when they are consumed"


# --- Parquet ---------------------------------------------------------------------------------------------------------


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()], ids=str)
def test_parquet_has_one_document_per_row(tmp_path, kind):
    texts = ["one\ntwo", "", "\u2028 é", "x" * (CHUNK + 5), *map(str, range(200))]
    columns = {"id": list(range(len(texts))), "text": pyarrow.array(texts, kind)}
    path = write_parquet(tmp_path / "a.parquet", columns, row_group_size=90)
    assert text_of(path) == texts
    assert ["".join(document) for document in list(read_documents(path))] == texts
    assert short_name(str(path)) == "a"


def test_parquet_files_in_a_folder_are_found(tmp_path):
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "image.png", b"\x89PNG\0")
    write_parquet(tmp_path / "a.parquet", {"text": ["a"]})
    assert [file.name for file in find_files(str(tmp_path), tmp_path)] == ["a.parquet", "b.txt"]


def test_memory_for_parquet_does_not_grow_with_a_row_group(tmp_path):
    """64 MB in one group, which no compression makes smaller than 32 MB."""
    texts = [os.urandom(2000).hex() for _ in range(16000)]
    path = write_parquet(tmp_path / "a.parquet", {"text": texts}, use_dictionary=False)
    assert pyarrow.parquet.ParquetFile(path).metadata.num_row_groups == 1
    script = (
        "import sys, pyarrow; from pathlib import Path; from data.sources import read_documents; "
        "print(sum(len(chunk) for document in read_documents(Path(sys.argv[1])) for chunk in document), "
        "pyarrow.default_memory_pool().max_memory())"
    )
    result = subprocess.run([sys.executable, "-c", script, path], cwd=ROOT, capture_output=True, text=True, check=True)
    size, peak = map(int, result.stdout.split())
    assert size == 64_000_000 and peak < 16 << 20


def test_parquet_without_texts_is_refused(tmp_path):
    for columns, message in (
        ({"content": ["a"], "n": [1]}, 'no column "text" of strings; it has content (string), n (int64)'),
        ({"text": [1, 2]}, 'no column "text" of strings; it has text (int64)'),
        ({"text": ["a"] * 70 + [None]}, "the text of row 71 is null"),
    ):
        path = write_parquet(tmp_path / "a.parquet", columns)
        with pytest.raises(ValueError) as excinfo:
            text_of(path)
        assert str(excinfo.value) == f"{path}: {message}"


def test_damaged_parquet_is_refused(tmp_path):
    whole = write_parquet(tmp_path / "whole.parquet", {"text": ["some text"] * 100}).read_bytes()
    for content in (b"", b"text", whole[:-20], whole[: len(whole) // 3], whole[:8] + bytes(40) + whole[48:]):
        path = write(tmp_path / "a.parquet", content)
        with pytest.raises(ValueError, match=r"a\.parquet: not a valid Parquet file") as excinfo:
            text_of(path)
        assert "\n" not in str(excinfo.value)
    not_utf8 = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
    )
    with pytest.raises(ValueError, match=r"a\.parquet: one of rows 1 to 64 is not UTF-8"):
        text_of(write_parquet(tmp_path / "a.parquet", {"text": not_utf8}))


def test_parquet_without_pyarrow_names_the_package(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError) as excinfo:
        text_of(path)
    assert str(excinfo.value) == f"{path}: Parquet files need the package pyarrow: pip install pyarrow"


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_gives_its_text_files_in_sorted_order(tmp_path):
    for name in ("b.md", "z/1", "y/1", "a/z", "a/b.py", "x/1", "c.jsonl", "d.txt.gz"):
        write(tmp_path / name, gzip.compress(b"x") if name.endswith("gz") else "{}")
    for name, content in (("image.png", b"\x89PNG\0"), (".hidden", "x"), (".git/config", "x")):
        write(tmp_path / name, content)
    found = [str(path.relative_to(tmp_path)) for path in find_files(str(tmp_path), tmp_path)]
    assert found == ["b.md", "c.jsonl", "d.txt.gz", "a/b.py", "a/z", "x/1", "y/1", "z/1"]


def test_a_link_to_nothing_in_a_folder_is_skipped(tmp_path):
    text = write(tmp_path / "a.txt", "x")
    (tmp_path / "b.txt").symlink_to("missing")
    assert find_files(str(tmp_path), tmp_path) == [text]


@pytest.mark.parametrize("before", [0, 10, CHUNK, 2 * CHUNK + 3])
@pytest.mark.parametrize("bad", [b"\xff\n", b"\xed\xa0\x80", b"\xc3"], ids=["byte", "surrogate", "cut off"])
def test_invalid_utf8_is_refused_with_its_byte_offset(tmp_path, before, bad):
    content = ("a" * 63 + "\n").encode() * (before // 64 + 1)
    content = content[:before] + bad
    for path in (write(tmp_path / "bad.txt", content), write(tmp_path / "bad.gz", gzip.compress(content, 1))):
        with pytest.raises(ValueError, match=rf"^{path}: not UTF-8 at byte {before};.*$"):
            text_of(path)


@pytest.mark.parametrize(
    "line", ["{", "[]", '"text"', "{}", '{"text": 3}', '{"text": null}', '{"text": "\\ud800"}', "[" * 100_000]
)
def test_an_invalid_jsonl_line_is_refused_with_its_number(tmp_path, line):
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"^{path}: line 3 is not a JSON object with a string .*$"):
        text_of(path)


def test_invalid_utf8_in_jsonl_is_refused_with_its_byte_offset(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n{"text": "\xe9"}\n')
    with pytest.raises(ValueError, match=rf"^{path}: not UTF-8 at byte 27;"):
        text_of(path)


def test_a_jsonl_line_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1000)
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + json.dumps({"text": "x" * 2000}))
    with pytest.raises(ValueError, match=rf"^{path}: line 2 is longer than"):
        text_of(path)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-20], lambda data: b"plain", lambda data: data[:99] + data[120:]]
)
def test_damaged_gzip_is_refused(tmp_path, damage):
    text = "".join(hashlib.sha256(bytes([number])).hexdigest() for number in range(200))
    path = write(tmp_path / "a.txt.gz", damage(gzip.compress(text.encode())))
    with pytest.raises(ValueError, match=rf"^{path}: not a valid gzip file$"):
        text_of(path)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^--data no/where: no such file or folder; pass python, .* or a path$"):
        find_files("no/where", tmp_path)
    with pytest.raises(ValueError, match=r"^--data .*: no text files in this folder$"):
        find_files(str(tmp_path), tmp_path)


def test_short_names_are_safe_in_folder_names(tmp_path):
    names = ["python", "shakespeare", "books/my novel.txt", "a.jsonl.gz", "notes/", "v1.2"]
    assert [short_name(name) for name in names] == ["python", "tinyshakespeare", "my_novel", "a", "notes", "v1_2"]


def test_a_folder_named_by_dots_has_its_own_name(tmp_path, monkeypatch):
    (tmp_path / "notes" / "old").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notes" / "old")
    assert [short_name(name) for name in (".", "..")] == ["old", "notes"]


# --- the standard library ---------------------------------------------------------------------------------------------


def test_python_is_the_standard_library_without_its_tests(tmp_path):
    files = find_files("python", tmp_path)
    names = {path.name for path in files}
    parts = {part for path in files for part in path.relative_to(Path(json.__file__).parents[1]).parts[:-1]}
    assert {"os.py", "argparse.py", "topics.py", "typing.py"} <= names
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert "unittest" in parts, "unittest is a module, not a test folder"
    assert 8e6 < sum(path.stat().st_size for path in files) < 20e6
    assert not list(tmp_path.iterdir())


# --- the download -----------------------------------------------------------------------------------------------------


@pytest.fixture
def website(monkeypatch):
    """A local server whose answer depends on the path, the right body, and the list of requested paths."""
    body, requests = b"To be, or not to be.\n" * 20_000, []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            if self.path == "/missing":
                return self.send_error(404)
            self.send_response(200)
            if self.path == "/aborted":  # a chunked body that ends early: http.client raises
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                return self.wfile.write(b"186a0\r\n" + body[:1000])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write({"/good": body, "/other": body.upper(), "/short": body[:100_000]}[self.path])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(sources, "SHAKESPEARE_SHA256", hashlib.sha256(body).hexdigest())

    def serve(path: str) -> None:
        monkeypatch.setattr(sources, "SHAKESPEARE_URL", f"http://127.0.0.1:{server.server_port}{path}")

    yield serve, body, requests
    server.shutdown()
    server.server_close()


def test_shakespeare_is_downloaded_once(tmp_path, website):
    serve, body, requests = website
    serve("/good")
    for _ in range(2):
        (path,) = find_files("shakespeare", tmp_path / "cache")
        assert path.read_bytes() == body
    assert requests == ["/good"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_damaged_download_is_downloaded_again(tmp_path, website):
    serve, body, requests = website
    serve("/good")
    (path,) = find_files("shakespeare", tmp_path)
    path.write_bytes(body[:-1])
    assert find_files("shakespeare", tmp_path)[0].read_bytes() == body
    assert len(requests) == 2


@pytest.mark.parametrize(
    ("page", "reason"),
    [("/other", "not tiny Shakespeare"), ("/short", "."), ("/aborted", "."), ("/missing", "404"), (None, "refused")],
)
def test_a_failed_download_says_what_to_do_and_leaves_no_file(tmp_path, website, monkeypatch, page, reason):
    serve, _, _ = website
    if page:
        serve(page)
    else:
        monkeypatch.setattr(sources, "SHAKESPEARE_URL", "http://127.0.0.1:9/")
    with pytest.raises(ValueError, match=rf"^--data shakespeare: .*{reason}.* and pass --data FILE, or .*$") as error:
        find_files("shakespeare", tmp_path / "cache")
    assert sources.SHAKESPEARE_URL in str(error.value)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").iterdir())
