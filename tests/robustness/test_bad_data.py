"""Text that is odd or damaged: it is prepared, or one line names the file or the flag, and no run is created."""

import gzip
import os
import re
from pathlib import Path

import pytest

import train
from data.prepare import prepare

LINES = "".join(f"line {number} of a text, 日本語 and é\n" for number in range(60)).encode()
ODD = [b"\n" * 2000, bytes(range(32)) * 60, b"\xef\xbb\xbf" + LINES, LINES.replace(b"\n", b"\r\n")]
ODD += ["👩‍👩‍👧‍👦".encode() * 60, ("a" + "\u0301" * 900).encode(), b"word " * 20_000]
ODD += ["▁ a ▁▁".encode() * 100, b"<s></s><unk><0x0A>" * 60, "one\u2028two\x85three\x0bfour\x0c".encode() * 40]


@pytest.mark.parametrize("content", ODD)
def test_odd_text_is_prepared_or_the_error_says_what_works(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    names, cache = [str(tmp_path / "a.txt")], tmp_path / "cache"
    prepared = prepare(names, "bytes", 0, cache, 32)
    ids = [token for file in (prepared.train, prepared.val) for token in file.tolist()]
    assert prepared.tokenizer.decode_bytes(ids) == content
    try:
        prepare(names, "sentencepiece", 300, cache, 2)
    except ValueError as error:
        advised = re.search(r"use at (?:most|least) (\d+)$|use --tokenizer (bytes)$|(--context)", str(error))
        assert advised, error
        if advised[1]:
            prepare(names, "sentencepiece", int(advised[1]), cache, 2)


REFUSED = {
    "a.txt": (LINES + b"\xff", f"a.txt: not UTF-8 at byte {len(LINES)}; convert it to UTF-8"),
    "a\nb.txt": (LINES.decode().encode("utf-16"), r"a\\nb.txt: not UTF-8 at byte 0"),
    os.fsdecode(b"\xff.txt"): (b"\xff", r"\\udcff.txt: not UTF-8 at byte 0"),
    "b.txt.gz": (gzip.compress(LINES)[:-9], "b.txt.gz: not a valid gzip file"),
    "f.txt": (b"short", "--data .*f.txt: the training text has at most 6 tokens, but --context 32 needs 33"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_data_is_refused_before_a_run_is_created(tmp_path, ends, name):
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    flags = f"--dim 8 --layers 1 --heads 2 --context 32 --steps 1 --device cpu --out {tmp_path / 'run'}".split()
    code, error = ends(train.main, [*flags, "--cache-dir", str(tmp_path / "cache"), "--data", str(tmp_path / name)])
    assert code == 2 and re.match(rf"error: .*{message}", error.splitlines()[-1]), error
    assert not Path(tmp_path, "run").exists()
