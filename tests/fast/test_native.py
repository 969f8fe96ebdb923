"""Building the kernels."""

import os
import subprocess

import pytest

from fast import native


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_a_compiler_may_say_what_is_not_utf8(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nprintf 'rat\\351\\n' >&2; exit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        native.build(str(compiler), [], tmp_path)
    assert failed.value.stderr == "rat\ufffd\n"
