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


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_a_library_is_built_again_when_anything_it_is_made_of_has_changed(tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo one; exit; fi\nfor out; do :; done\necho > "$out"\n'
    )
    compiler.chmod(0o755)
    files = [tmp_path / path.name for path in (native.HEADER, *native.SOURCES)]
    for path in files:
        path.write_text("// nothing")
    monkeypatch.setattr(native, "HEADER", files[0])
    monkeypatch.setattr(native, "SOURCES", files[1:])
    built = {native.build(str(compiler), ["-O3"], tmp_path), native.build(str(compiler), ["-O3"], tmp_path)}
    assert len(built) == 1
    for path in files:
        path.write_text("// something")
        built.add(native.build(str(compiler), ["-O3"], tmp_path))
    built.add(native.build(str(compiler), ["-O2"], tmp_path))
    compiler.write_text(compiler.read_text().replace("echo one", "echo two"))
    built.add(native.build(str(compiler), ["-O2"], tmp_path))
    assert len(built) == 1 + len(files) + 2 and built == set(tmp_path.glob("*.so"))
