"""Text that is odd, damaged or no text: it trains, or one line names the file and the place, and nothing is created."""

import gzip
import json
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import train
from runtime.process import bad_input
from runtime.run import resolve_settings

CONTEXT = 32
SIZES = f"--dim 8 --layers 1 --heads 2 --context {CONTEXT} --batch-size 2 --device cpu --dtype float32 --no-fast"
LINES = "".join(f"line {number} of a text, 日本語 and é\n" for number in range(60))
TEXT = LINES.encode()
ROW = json.dumps({"text": LINES}).encode() + b"\n"
TRAINS = ""

Make = Callable[[Path], Path | list[Path]]  # writes the data into a folder and returns what to name as --data
Case = tuple[Make, str]  # a pattern for the error, or TRAINS


def file(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def in_folder(*files: tuple[str, bytes]) -> Make:
    def make(folder: Path) -> Path:
        for name, content in files:
            path = Path(os.fsdecode(os.fsencode(folder / "texts") + b"/" + os.fsencode(name)))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder / "texts"

    return make


def parquet(**columns: list) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "data.parquet")
        return folder / "data.parquet"

    return make


def fifo(name: str) -> Make:
    def make(folder: Path) -> Path:
        os.mkfifo(folder / name)
        return folder / name

    return make


def unix_socket(folder: Path) -> Path:
    before = os.getcwd()
    os.chdir(folder)  # its path may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("socket.txt")
    finally:
        os.chdir(before)
    return folder / "socket.txt"


def link(name: str, target: str) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).symlink_to(target)
        return folder / name

    return make


def beside_text(make: Make) -> Make:
    """A folder with a good text and what `make` makes."""

    def both(folder: Path) -> Path:
        (folder / "texts").mkdir()
        (folder / "texts/good.txt").write_bytes(TEXT)
        make(folder / "texts")
        return folder / "texts"

    return both


def cycle(folder: Path) -> Path:
    (folder / "texts/inner").mkdir(parents=True)
    (folder / "texts/good.txt").write_bytes(TEXT)
    (folder / "texts/inner/outer").symlink_to("..")
    return folder / "texts"


def repeated(make: Make) -> Make:
    def twice(folder: Path) -> list[Path]:
        made = make(folder)
        assert isinstance(made, Path)
        return [made, made]

    return twice


def documents(*sizes: int) -> bytes:
    """Documents of ASCII text with so many bytes, as .jsonl, all different."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=size)) for size in sizes]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def closed(folder: Path) -> Path:
    path = file("closed.txt", TEXT)(folder)
    path.chmod(0)
    return path


SMALL = r"has at most \d+ tokens, but --context 32 needs 33"
NOT_UTF8 = r"\.txt: not UTF-8 at byte {}; convert it to UTF-8"
NO_TEXT = "contains no text"
NOT_GZIP = r"\.gz: not a valid gzip file"
NO_FILE = r"no such file or folder"
BAD_LINE = 'data.jsonl: line {} is not a JSON object with a string under "text"'
NO_FOLDER = "no text files in this folder"
NO_COLUMN = 'data.parquet: no column "text" of strings'
BAD_PARQUET = r"data\.parquet: not a valid Parquet file"
PACKED = gzip.compress(TEXT)

CASES: dict[str, Case] = {
    # Text files: everything that is UTF-8 trains.
    "plain": (file("a.txt", TEXT), TRAINS),
    "only newlines": (file("a.txt", b"\n" * 2000), TRAINS),
    "only spaces": (file("a.txt", b" " * 2000), TRAINS),
    "only tabs": (file("a.txt", b"\t" * 2000), TRAINS),
    "one character": (file("a.txt", b"a"), SMALL),
    "one character of four bytes": (file("a.txt", "😀".encode()), SMALL),
    "empty": (file("a.txt", b""), NO_TEXT),
    "shorter than the context": (file("a.txt", b"short text"), SMALL),
    "validation shorter than the context": (file("a.txt", b"ab" * 100), "the validation text has at most"),
    "a byte-order mark": (file("a.txt", b"\xef\xbb\xbf" + TEXT), TRAINS),
    "only a byte-order mark": (file("a.txt", b"\xef\xbb\xbf"), SMALL),
    "NUL bytes": (file("a.txt", b"a\0b" * 500), TRAINS),
    "only NUL bytes": (file("a.txt", bytes(2000)), TRAINS),
    "carriage returns": (file("a.txt", TEXT.replace(b"\n", b"\r")), TRAINS),
    "CR LF": (file("a.txt", TEXT.replace(b"\n", b"\r\n")), TRAINS),
    "line separators": (file("a.txt", "one\u2028two\u2029three\x85four\x0bfive\x0c".encode() * 40), TRAINS),
    "control characters": (file("a.txt", bytes(range(32)) * 60), TRAINS),
    "escape sequences": (file("a.txt", b"\x1b[2J\x1b]0;title\x07" * 120), TRAINS),
    "U+2581": (file("a.txt", "▁ a ▁▁".encode() * 100), TRAINS),
    "U+FFFD and noncharacters": (file("a.txt", "\ufffd\ufffe\uffff\U0010ffff".encode() * 100), TRAINS),
    "combining characters": (file("a.txt", ("a" + "\u0301" * 500).encode()), TRAINS),
    "emoji": (file("a.txt", "👩‍👩‍👧‍👦🏳️‍🌈".encode() * 40), TRAINS),
    "right to left": (file("a.txt", "שלום \u202eabc\u202c ".encode() * 60), TRAINS),
    "one line of a megabyte": (file("a.txt", b"word " * 200_000), TRAINS),
    "reserved pieces": (file("a.txt", b"<s></s><unk><0x0A>" * 60), TRAINS),
    "no ending": (file("noending", TEXT), TRAINS),
    "another ending": (file("a.bin", TEXT), TRAINS),
    "a hidden file": (file(".hidden", TEXT), TRAINS),
    "a name with spaces": (file(" a b .txt", TEXT), TRAINS),
    "a name with a line end": (file("a\nb.txt", TEXT), TRAINS),
    "a bad file whose name has a line end": (file("a\nb.txt", b"\xff"), NOT_UTF8.format(0)),
    "a name that is not UTF-8": (file(os.fsdecode(b"a\xff.txt"), TEXT), TRAINS),
    "a bad file whose name is not UTF-8": (file(os.fsdecode(b"a\xff.txt"), b"\xff"), NOT_UTF8.format(0)),
    "a name of 250 bytes": (file("a" * 246 + ".txt", TEXT), TRAINS),
    "a name with a quote and a comma": (file("a'b\",c$(x).txt", TEXT), TRAINS),
    # Not UTF-8: the byte is named.
    "UTF-16 with a mark": (file("a.txt", LINES.encode("utf-16")), NOT_UTF8.format(0)),
    "UTF-16": (file("a.txt", LINES.encode("utf-16-be")), NOT_UTF8.format(r"\d+")),
    "UTF-32": (file("a.txt", LINES.encode("utf-32")), NOT_UTF8.format(0)),
    "Latin-1": (file("a.txt", "déjà vu ".encode("latin-1") * 90), NOT_UTF8.format(1)),
    "a bad byte at the end": (file("a.txt", TEXT + b"\xff"), NOT_UTF8.format(len(TEXT))),
    "a bad byte after a megabyte": (file("a.txt", b"x" * 1_500_000 + b"\xfe"), NOT_UTF8.format(1_500_000)),
    "half a character": (file("a.txt", TEXT + "é".encode()[:1]), NOT_UTF8.format(len(TEXT))),
    "a surrogate": (file("a.txt", b"ab\xed\xa0\x80" + TEXT), NOT_UTF8.format(2)),
    "an overlong NUL": (file("a.txt", b"abc\xc0\x80" + TEXT), NOT_UTF8.format(3)),
    "beyond Unicode": (file("a.txt", b"\xf4\x90\x80\x80" + TEXT), NOT_UTF8.format(0)),
    "random bytes": (file("a.txt", random.Random(1).randbytes(2000)), NOT_UTF8.format(r"\d+")),
    # Compressed.
    "gzip": (file("a.txt.gz", PACKED), TRAINS),
    "gzip of nothing": (file("a.txt.gz", gzip.compress(b"")), NO_TEXT),
    "gzip in two parts": (file("a.txt.gz", PACKED + PACKED), TRAINS),
    "gzip followed by zeros": (file("a.txt.gz", PACKED + bytes(100)), TRAINS),
    "gzip followed by something else": (file("a.txt.gz", PACKED + b"tail"), NOT_GZIP),
    "half of a gzip": (file("a.txt.gz", PACKED[: len(PACKED) // 2]), NOT_GZIP),
    "gzip without its last byte": (file("a.txt.gz", PACKED[:-1]), NOT_GZIP),
    "gzip with a wrong sum": (file("a.txt.gz", PACKED[:-8] + bytes(4) + PACKED[-4:]), NOT_GZIP),
    "gzip with another method": (file("a.txt.gz", PACKED[:2] + b"\x09" + PACKED[3:]), NOT_GZIP),
    "gzip with damaged data": (file("a.txt.gz", PACKED[:20] + b"\xff" * 20 + PACKED[40:]), NOT_GZIP),
    "only the mark of gzip": (file("a.txt.gz", b"\x1f\x8b"), NOT_GZIP),
    "text called .gz": (file("a.txt.gz", TEXT), NOT_GZIP),
    "an empty file called .gz": (file("a.txt.gz", b""), NO_TEXT),
    "gzip called .txt": (file("a.txt", PACKED), NOT_UTF8.format(1)),
    "not UTF-8 in gzip": (file("a.txt.gz", gzip.compress(TEXT + b"\xff")), rf"not UTF-8 at byte {len(TEXT)}"),
    # .jsonl
    "jsonl": (file("data.jsonl", ROW * 2), TRAINS),
    "jsonl in gzip": (file("data.jsonl.gz", gzip.compress(ROW * 2)), TRAINS),
    "jsonl with blank lines": (file("data.jsonl", b"\n \n" + ROW + b"\r\n" + ROW.strip()), TRAINS),
    "jsonl with a byte-order mark": (file("data.jsonl", b"\xef\xbb\xbf" + ROW), BAD_LINE.format(1)),
    "jsonl of nothing": (file("data.jsonl", b"\n\n"), NO_TEXT),
    "jsonl of empty texts": (file("data.jsonl", b'{"text": ""}\n' * 9), NO_TEXT),
    "jsonl without the field": (file("data.jsonl", ROW + b'{"content": "a"}\n'), BAD_LINE.format(2)),
    "jsonl with a number": (file("data.jsonl", ROW + b'{"text": 1}\n'), BAD_LINE.format(2)),
    "jsonl with a list": (file("data.jsonl", b'{"text": ["a"]}\n'), BAD_LINE.format(1)),
    "jsonl with null": (file("data.jsonl", b'{"text": null}\n'), BAD_LINE.format(1)),
    "jsonl of a string": (file("data.jsonl", b'"text"\n'), BAD_LINE.format(1)),
    "jsonl of a list": (file("data.jsonl", b'["text"]\n'), BAD_LINE.format(1)),
    "jsonl that is one array": (file("data.jsonl", b"[\n" + ROW.strip() + b",\n" + ROW + b"]\n"), BAD_LINE.format(1)),
    "jsonl with half a line": (file("data.jsonl", ROW + ROW[:50]), BAD_LINE.format(2)),
    "jsonl with a deep line": (file("data.jsonl", ROW + b"[" * 100_000 + b"\n"), BAD_LINE.format(2)),
    "jsonl with deep fields": (file("data.jsonl", b'{"text": ' * 100_000 + b"\n"), BAD_LINE.format(1)),
    "jsonl with a lone surrogate": (file("data.jsonl", ROW + b'{"text": "\\ud800"}\n'), BAD_LINE.format(2)),
    "jsonl with a pair of surrogates": (file("data.jsonl", b'{"text": "' + b"\\ud83d\\ude00" * 99 + b'"}\n'), TRAINS),
    "jsonl with a huge number": (file("data.jsonl", b'{"text": ' + b"9" * 9999 + b"}\n"), BAD_LINE.format(1)),
    "jsonl with two texts": (file("data.jsonl", b'{"text": 1, ' + ROW[1:]), TRAINS),
    "jsonl in UTF-16": (file("data.jsonl", ROW.decode().encode("utf-16")), "not UTF-8 at byte 0"),
    "jsonl not UTF-8": (file("data.jsonl", ROW + b'{"text": "\xff"}\n'), f"not UTF-8 at byte {len(ROW) + 10}"),
    "context + 1 tokens": (file("data.jsonl", documents(CONTEXT, CONTEXT)), TRAINS),
    "context tokens": (file("data.jsonl", documents(CONTEXT - 1, CONTEXT - 1)), SMALL),
    # Parquet
    "parquet": (parquet(text=[LINES, LINES + "b"]), TRAINS),
    "parquet without the column": (parquet(content=["a"]), NO_COLUMN),
    "parquet of numbers": (parquet(text=[1, 2]), NO_COLUMN),
    "parquet with null": (parquet(text=[LINES, None]), r"data\.parquet: the text of row 2 is null"),
    "parquet without rows": (parquet(text=pyarrow.array([], pyarrow.string())), NO_TEXT),
    "parquet without columns": (parquet(), NO_COLUMN),
    "text called .parquet": (file("data.parquet", TEXT), BAD_PARQUET),
    "an empty file called .parquet": (file("data.parquet", b""), BAD_PARQUET),
    # Folders
    "a folder": (in_folder(("a.txt", TEXT), ("b/c.md", TEXT + b"d")), TRAINS),
    "an empty folder": (in_folder(("a/.hidden", TEXT)), NO_FOLDER),
    "a folder of binaries": (in_folder(("a.txt", b"a\0b" * 99)), NO_FOLDER),
    "a folder with a binary": (in_folder(("a.txt", TEXT), ("b.png", b"\x89PNG\0")), TRAINS),
    "a folder with a bad file": (in_folder(("a.txt", TEXT), ("bad.txt", b"a\xff")), "bad" + NOT_UTF8.format(1)),
    "a folder with a bad gzip": (in_folder(("a.txt", TEXT), ("bad.txt.gz", b"no")), "bad" + r"\.txt" + NOT_GZIP),
    "a folder with a bad jsonl": (in_folder(("a.txt", TEXT), ("data.jsonl", b"[")), BAD_LINE.format(1)),
    "a folder with an empty file": (in_folder(("a.txt", TEXT), ("b.txt", b"")), TRAINS),
    "a folder of empty files": (in_folder(("a.txt", b""), ("b.txt", b"")), NO_TEXT),
    "a folder called x.txt": (in_folder(("x.txt/a.md", TEXT)), TRAINS),
    "a folder called x.jsonl": (in_folder(("x.jsonl/a.md", TEXT)), TRAINS),
    "a folder with names that are not UTF-8": (in_folder((os.fsdecode(b"\xff/\xfe.txt"), TEXT)), TRAINS),
    "a folder that holds itself": (cycle, TRAINS),
    # What is no file
    "nothing there": (lambda folder: folder / "missing.txt", NO_FILE),
    "below a file": (lambda folder: file("a.txt", TEXT)(folder) / "b.txt", NO_FILE),
    "a name of 5000 bytes": (lambda folder: folder / ("a" * 5000), "File name too long"),
    "a FIFO": (fifo("a.txt"), "a.txt is a pipe or a device"),
    "a socket": (unix_socket, "socket.txt is a pipe or a device"),
    "a device": (lambda folder: Path("/dev/zero"), "/dev/zero is a pipe or a device"),
    "a terminal": (lambda folder: Path("/dev/tty"), "/dev/tty is a pipe or a device"),
    "a link to nothing": (link("a.txt", "missing"), NO_FILE),
    "a link to itself": (link("a.txt", "a.txt"), NO_FILE),
    "a link to a device": (link("a.txt", "/dev/zero"), "a.txt is a pipe or a device"),
    "a folder with a FIFO": (beside_text(fifo("b.txt")), TRAINS),
    "a folder with a socket": (beside_text(unix_socket), TRAINS),
    "a folder with a link to itself": (beside_text(link("b.txt", "b.txt")), TRAINS),
    "a folder with a link to a device": (beside_text(link("b.txt", "/dev/zero")), TRAINS),
    "a folder with a link to nothing": (beside_text(link("b.txt", "missing")), TRAINS),
    "the same file twice": (repeated(file("a.txt", TEXT)), TRAINS),
}  # fmt: skip


if sys.platform == "darwin":  # whose file names are all UTF-8
    CASES = {name: case for name, case in CASES.items() if "not UTF-8" not in name or "name" not in name}
if os.geteuid():
    CASES["a file that may not be read"] = (closed, r"Permission denied: .*closed\.txt")


def check(flags: list[str]) -> None:
    """What train.py does before it trains: it reads and prepares the text."""
    with bad_input():
        resolve_settings(train.parse(flags))


@pytest.fixture
def flags(tmp_path: Path) -> Callable[..., list[str]]:
    """`flags(data)`: those of a run of one step in tmp_path/run."""

    def of(data: Path | list[Path], tokenizer: str = "bytes") -> list[str]:
        sources = map(str, data if isinstance(data, list) else [data])
        places = ["--cache-dir", str(tmp_path / "cache"), "--out", str(tmp_path / "run")]
        return [*SIZES.split(), "--steps", "1", "--tokenizer", tokenizer, *places, "--data", *sources]

    return of


def test_bad_data(tmp_path, flags, ends, cases, record):
    """Each case is refused or accepted as expected. Of those that are accepted, all train with --full, one without."""
    accepted = [name for name, (_, pattern) in CASES.items() if pattern == TRAINS]
    trained = sorted(accepted, key=lambda name: "name that is not UTF-8" not in name)[: cases(1, len(accepted))]
    for number, (name, (make, pattern)) in enumerate(CASES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        code, error = ends(train.main if name in trained else check, flags(make(folder)))
        if pattern == TRAINS:
            assert code == 0, (name, error)
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
        else:
            assert code == 2 and re.search(pattern, error), (name, error)
            assert error.startswith("error: ") and error.count("\n") == 1, (name, error)
            assert not (tmp_path / "run").exists(), name
    record(cases=len(CASES), accepted_and_trained=len(trained), refused=len(CASES) - len(accepted))


def test_bad_data_for_sentencepiece(tmp_path, flags, ends, cases, record):
    """What the byte tokenizer accepts: SentencePiece is trained on it, or the error says with which flag it works."""
    advised = {"too large": 0, "cannot hold": 0, "learns nothing": 0}
    accepted = [make for make, pattern in CASES.values() if pattern == TRAINS]
    for number, make in enumerate(accepted[: cases(8, len(accepted))]):
        folder = tmp_path / str(number)
        folder.mkdir()
        wanted = flags(make(folder), "sentencepiece")
        code, error = ends(check, [*wanted, "--vocab-size", "300"])
        if code and "--context" in error:  # fewer tokens than bytes
            continue
        if code:
            assert code == 2 and "Traceback" not in error, error
            line = error.splitlines()[-1]
            if advice := re.search(r"(too large|cannot hold).*; use at (?:most|least) (\d+)$", line):
                advised[advice[1]] += 1
                code, error = ends(check, [*wanted, "--vocab-size", advice[2]])
            else:
                assert "learns nothing from this text" in line and line.endswith("use --tokenizer bytes"), line
                advised["learns nothing"] += 1
                continue
        assert code == 0 or "--context" in error, error
    record(cases=len(accepted), refused=advised)


def test_damaged_parquet(tmp_path, flags, ends, cases, record):
    """Parquet keeps no sum of its bytes: a damaged file is read, or refused in one line that names it."""
    draw, refused = random.Random(0), 0
    whole = parquet(text=[LINES, LINES + "b"])(tmp_path).read_bytes()
    for number in range(cases(10, 300)):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 30)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path = file(f"{number}.parquet", bytes(content))(tmp_path)
        code, error = ends(check, flags(path))
        assert code in (0, 2), error
        if code:
            assert error.startswith("error: ") and error.count("\n") == 1 and path.name in error, error
            refused += 1
    record(files=cases(10, 300), refused=refused)
