"""Building the kernels."""

import torch

from fast import native


def test_without_a_cache_directory_there_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    library, reason = native.load.__wrapped__(torch.float32)
    assert library is None and "could not build fast/decode.c: " in str(reason) and "file/normal-llama" in str(reason)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # neither HOME nor a passwd entry
    assert "home directory" in str(native.load.__wrapped__(torch.float32)[1])


def test_a_library_is_built_again_when_anything_it_is_made_of_has_changed(tmp_path, monkeypatch):
    compiler, source = tmp_path / "cc", tmp_path / "decode.c"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo one && exit\nfor out; do :; done\necho > "$out"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "SOURCE", source)
    source.write_text("// nothing")
    built = {native.build(str(compiler), flags) for flags in (["-O3"], ["-O3"], ["-O2"])}
    source.write_text("// something")
    built.add(native.build(str(compiler), ["-O3"]))
    compiler.write_text(compiler.read_text().replace("echo one", "echo two"))
    built.add(native.build(str(compiler), ["-O3"]))
    assert len(built) == 4 and built == set(tmp_path.glob("normal-llama/*.so"))
