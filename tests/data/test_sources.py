"""Which files a `--data` name finds, how they are read, and how invalid files are refused."""

import gzip
import hashlib
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data import sources
from data.sources import find_files, read_documents, short_name, text_files

CHUNK = sources.CHUNK_BYTES
TEXTS = ["one\ntwo", "", "\u2028 é", "x" * (CHUNK + 5), *map(str, range(200))]


def texts_behind(name: str, cache_dir: Path, flag: str = "--data") -> list[Path]:
    return text_files(name, find_files(name, cache_dir, flag), flag)


def text_of(path: Path, column: str = "text") -> list[str]:
    return ["".join(document) for document in list(read_documents([path], column))]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_text_file_is_one_document_with_every_byte_kept(tmp_path):
    text = "one\r\ntwo\ufeff\rthree\n\n\0 é\u2028"
    for start in ("", "\ufeff"):  # a byte order mark is no part of the text
        for rest in (text, "", "a", "\ufeff" + text):
            assert text_of(write(tmp_path / "a.txt", start + rest)) == [rest.removeprefix("\ufeff" * (not start))]
        assert text_of(write(tmp_path / "a.txt.GZ", gzip.compress((start + text).encode()))) == [text]


@pytest.mark.parametrize("unit", ["x" * 79 + "\n", "é", "a" + "😀" * 1000, "ab\n" + "語" * (CHUNK // 2)])
def test_long_files_are_chunked_without_splitting_characters(tmp_path, unit):
    text = unit * (3 * CHUNK // len(unit.encode()) + 1)
    chunks = [chunk for document in read_documents([write(tmp_path / "long", text)]) for chunk in document]
    assert "".join(chunks) == text
    assert len(chunks) > 2 and max(len(chunk.encode()) for chunk in chunks) <= 2 * CHUNK


def test_jsonl_has_one_document_per_line_and_parquet_one_per_row(tmp_path):
    lines = [json.dumps({"id": 1, "text": text}) for text in TEXTS]
    content = "\n".join([*lines[:2], " ", *lines[2:]]).encode()
    for name in ("a.JSONL", "a.ndjson", "a.jsonlines", "a.json", "a.jsonl"):
        assert text_of(write(tmp_path / name, content)) == TEXTS
    assert text_of(write(tmp_path / "a.JSON.gz", gzip.compress(b"\xef\xbb\xbf" + content))) == TEXTS
    assert max(len(chunk) for document in read_documents([tmp_path / "a.jsonl"]) for chunk in document) == CHUNK
    strings = pyarrow.string()
    for kind in (strings, pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int32(), strings)):
        table = pyarrow.table({"id": list(range(len(TEXTS))), "text": pyarrow.array(TEXTS, strings).cast(kind)})
        pyarrow.parquet.write_table(table, tmp_path / "a.PARQUET", row_group_size=90)
        assert text_of(tmp_path / "a.PARQUET") == TEXTS, kind


def test_rows_whose_text_is_null_are_left_out_and_counted_and_the_column_can_be_named(tmp_path, capsys):
    texts = ["one", None, "", *map(str, range(100)), None]
    lines = "\n".join(json.dumps({"text": 1, "content": text}) for text in texts)
    rows = parquet(text=[1] * len(texts), content=texts)
    for path in (write(tmp_path / "a.jsonl", lines), write(tmp_path / "a.parquet", rows)):
        assert text_of(path, "content") == [text for text in texts if text is not None]
        assert capsys.readouterr().err == f"{path}: rows left out, because their text is null: 2\n"


OTHER_JSON = ['{"a": 1}', '{\n"a": 1}\n', '[{"text": "a"},\n{"text": "b"}]', "[\n  {", "", "{}\n[]\n", "{}{}"]


@pytest.mark.parametrize("content", [*OTHER_JSON, pytest.param("[" * 100_000, id="deep")])
def test_other_json_is_text(tmp_path, content, capsys):
    path = write(tmp_path / "a.json", content)
    write(tmp_path / "lines.json", '{"text": "a"}\n{"text": "b"}\n')
    assert text_of(path) == [content]
    for name, count in ((path, 1), (tmp_path, 2)):
        assert len(texts_behind(str(name), tmp_path)) == count
        line = f"--data {name}: 1 .json read as one text, such as {path}; convert it to JSON lines, one object a line"
        assert line in capsys.readouterr().err


def test_a_folder_gives_its_text_files_in_sorted_order_and_names_what_is_left_out(tmp_path, capsys):
    for name in ("b.md", "a/z", "a/b.py", "x/1", "c.jsonl", "d.gz", "empty", "partial-dev-0.md", "valid/0", "tests/x"):
        write(tmp_path / name, gzip.compress(b"x") if name.endswith("gz") else "{}" * (name != "empty"))
    for name, content in (("image.png", b"\x89PNG\0"), (".hidden", "x"), (".git/config", "x"), ("e.parquet", b"\0")):
        write(tmp_path / name, content)
    for number in range(5):
        write(tmp_path / f"x/{number}.csv", "a,b\n1,2\n")
    write(tmp_path / "a/old.txt", "text".encode("utf-16"))
    (tmp_path / "link").symlink_to("missing")
    os.mkfifo(tmp_path / "x/pipe")
    found = [str(path.relative_to(tmp_path)) for path in texts_behind(str(tmp_path), tmp_path)]
    names = ["b.md", "c.jsonl", "d.gz", "e.parquet", "empty", "partial-dev-0.md", "a/b.py", "a/z", "tests/x", "valid/0"]
    assert found == [*names, "x/1"]
    reasons = ["11 files", "hidden: 2 (.git, .hidden)", "binary or UTF-16: 2 (image.png, a/old.txt)"]
    reasons += ["no regular file: 2 (link, x/pipe)", "CSV or TSV: 5 (x/0.csv, x/1.csv, x/2.csv, ...)"]
    line = f"{tmp_path}: {'; left out as '.join(reasons)}"
    other_split = "to train on, though named like text for --val-data: 2 (partial-dev-0.md, valid/0)"
    assert capsys.readouterr().err == f"--data {line}; {other_split}\n"
    texts_behind(str(tmp_path), tmp_path, "--val-data")
    assert capsys.readouterr().err == f"--val-data {line}\n"


def test_links_are_followed_and_each_real_folder_is_taken_once(tmp_path, capsys):
    write(tmp_path / "elsewhere/deep/a.txt", "a")
    write(tmp_path / "notes/b.txt", "b")
    (tmp_path / "notes/again").symlink_to(tmp_path / "elsewhere/deep")
    (tmp_path / "notes/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "notes/loop").symlink_to(tmp_path / "notes")
    found = [str(path.relative_to(tmp_path)) for path in texts_behind(str(tmp_path / "notes"), tmp_path)]
    assert found == ["notes/b.txt", "notes/again/a.txt"]
    assert capsys.readouterr().err == f"--data {tmp_path}/notes: 2 files\n"


def test_names_that_are_no_text_are_refused_with_what_to_make_of_them(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path / "a.TSV.gz", gzip.compress(b"text\tid\nfirst\t1\n"))
    write(tmp_path / "utf-16", "café".encode("utf-16"))
    problems = dict.fromkeys(("pipe", "missing"), ": no such file or folder; pass python, shakespeare or a path")
    problems["a.TSV.gz"] = " is CSV or TSV, not text in UTF-8; .* make JSON lines of a table"
    problems["utf-16"] = " is binary or UTF-16, not text in UTF-8; convert it"
    for name in ("dataset_dict.json", "train/dataset_info.json", "train/state.json", "train/data-0.arrow"):
        write(tmp_path / "saved" / name, "{}")
    problems["saved"] = rf' holds Arrow .*load_from_disk\("{tmp_path}/saved/train"\)\.to_parquet\('
    for name, problem in problems.items():
        with pytest.raises(ValueError, match=f"^--val-data {tmp_path / name}{problem}"):
            texts_behind(str(tmp_path / name), tmp_path, "--val-data")
    assert texts_behind(str(write(tmp_path / ".notes", "a")), tmp_path), "hidden, but named"


def test_short_names_are_safe_in_folder_names():
    names = ["python", "shakespeare", "books/my novel.txt", "a.jsonl.gz", "notes/", "v1.2"]
    assert [short_name(name) for name in names] == ["python", "tinyshakespeare", "my_novel", "a", "notes", "v1_2"]


def test_python_is_the_standard_library_without_its_tests(tmp_path):
    files = find_files("python", tmp_path)
    names = {path.name for path in files}
    parts = {part for path in files for part in path.relative_to(Path(json.__file__).parents[1]).parts[:-1]}
    assert {"os.py", "argparse.py", "topics.py", "typing.py"} <= names
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert not any(name.startswith("_sysconfigdata") for name in names)
    assert {path.suffix for path in files} <= {".py", ".txt", ".rst"}
    assert 8e6 < sum(path.stat().st_size for path in files) < 20e6
    assert files == find_files("python", tmp_path) and not list(tmp_path.iterdir()), "nothing is downloaded"


LINE = b'{"text": "fine"}\n\n'
NOT_AN_OBJECT, NO_STRING = "line 3 is not a JSON object in UTF-8", 'line 3 has no valid string under "text"'
NOT_GZIP, NO_COLUMN, NO_PARQUET = "not a valid gzip file$", 'no column "text" of strings', "not a valid Parquet file"
CHAT = LINE + b'{"id": 1, "messages": [{"role": "user", "content": "hi"}]}\n'
NO_OBJECTS = [b"{", b"[]", b"[" * 100_000, b'{"text": "\xe9"}']


def parquet(**columns) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


NOT_UTF8 = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff"], pyarrow.binary()).buffers())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((f"{line[:12]!r}.jsonl", LINE + line + b"\n", NOT_AN_OBJECT) for line in NO_OBJECTS),
        ("half.jsonl", LINE + b'{"text": "\\ud800"}\n', NO_STRING + ", but {'text': 'str'}; name one"),
        ("short.txt.gz", gzip.compress(b"text" * 999)[:-20], NOT_GZIP),
        ("text.txt.gz", b"plain", NOT_GZIP),
        ("columns.parquet", parquet(content=["a"], n=[1]), NO_COLUMN + ", but {'content': 'string', 'n': 'int64'}"),
        ("chat.jsonl", CHAT, f"{NO_STRING}, but {{'id': 'int', 'messages': 'list'}}; name one with --text-column"),
        ("bytes.parquet", parquet(text=NOT_UTF8), NO_PARQUET),
        ("cut.parquet", parquet(text=["some text"] * 100)[:99], NO_PARQUET),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message) as error:
        text_of(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("before", [0, 10, CHUNK, 2 * CHUNK + 3])
@pytest.mark.parametrize("bad", [b"\xff\n", b"\xed\xa0\x80", b"\xc3"], ids=["byte", "surrogate", "cut off"])
def test_invalid_utf8_is_refused_with_its_byte_offset(tmp_path, before, bad):
    content = (b"a" * 63 + b"\n") * (before // 64 + 1)
    content = content[:before] + bad
    marked = gzip.compress(b"\xef\xbb\xbf" + content, 1)
    for path, mark in ((write(tmp_path / "bad.txt", content), 0), (write(tmp_path / "bad.gz", marked), 3)):
        with pytest.raises(ValueError, match=rf"^{path}: not UTF-8 at byte {before + mark};.*$"):
            text_of(path)


def test_shakespeare_is_downloaded_once_and_a_failure_says_what_to_do(tmp_path, monkeypatch, capfd):
    page, cache = write(tmp_path / "page", b"To be, or not to be.\n" * 20_000), tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(sources, "SHAKESPEARE_URL", page.as_uri())
    monkeypatch.setattr(sources, "SHAKESPEARE_SHA256", hashlib.sha256(page.read_bytes()).hexdigest())
    for _ in range(2):
        (path,) = find_files("shakespeare", cache)
        assert path.read_bytes() == page.read_bytes()
    assert capfd.readouterr().err == f"downloading {page.as_uri()}\n"
    path.write_bytes(page.read_bytes()[:-1])
    assert find_files("shakespeare", cache)[0].read_bytes() == page.read_bytes(), "a damaged file is not used"
    for content, reason in ((b"TO BE", "not tiny Shakespeare"), (None, "No such file")):
        path.unlink(missing_ok=True)
        page.write_bytes(content) if content else page.unlink()
        advice = f"download {page.as_uri()} yourself and pass --data FILE, or use --data python$"
        with pytest.raises(ValueError, match=rf"^--data shakespeare: the download failed \(.*{reason}.*\); {advice}"):
            find_files("shakespeare", cache)
        assert not list(cache.glob("*.txt*"))
