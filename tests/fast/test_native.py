"""Building the kernels."""

import os
import subprocess

import pytest

from fast import native


def test_without_a_cache_directory_the_kernels_are_built_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(native, "FLAGS", ["-O0", *native.FLAGS[1:]])  # quick to build
    library, reason = native.load.__wrapped__()
    assert library and reason is None


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_a_compiler_may_say_what_is_not_utf8(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nprintf 'rat\\351\\n' >&2; exit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        native.build(str(compiler), [], tmp_path)
    assert failed.value.stderr == "rat\ufffd\n"
