"""C files, each built with the system's C compiler when it is first needed, and loaded."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import threading
from functools import cache
from pathlib import Path
from typing import Any

SHARED = Path(__file__).with_name("vectors.h")
BUILT = Path(__file__).parent / ".cache" / "native"
FLAGS = ["-O3", "-march=native", "-fPIC", "-shared", "-fno-strict-aliasing", "-fno-math-errno", "-Wno-psabi"]
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("-mprefer-vector-width=512")
# Without a library of its own for threads: torch has brought one, and a second would be a second pool of threads.
THREADS = {"on torch's threads": ["-fopenmp", "-nostdlib"], "on one thread": ["-Wno-unknown-pragmas", "-lm"]}
ARGUMENTS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


@cache
def library(source: Path) -> tuple[ctypes.CDLL | None, str]:
    """The functions of a C file, and a few words on how they were built; or None, and why they are not to be had."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or os.name == "nt":
        return None, "no C compiler (cc, gcc or clang) was found"
    for how, flags in THREADS.items():
        try:
            return ctypes.CDLL(str(build(source, compiler, [*FLAGS, *flags]))), f"kernels by {compiler} {how}"
        except subprocess.CalledProcessError as error:
            why = error.stderr.strip().partition("\n")[0]
        except OSError as error:
            why = str(error)
    return None, f"{compiler} could not build the kernels: {why}"


@cache
def function(source: Path, name: str, arguments: str) -> Any:
    """A C file's function that returns nothing, by a letter for each argument: address, whole number or float.

    An address is `tensor.data_ptr()` or None. Ask `library` first whether the file can be built.
    """
    loaded, _ = library(source)
    assert loaded
    return ctypes.CFUNCTYPE(None, *[ARGUMENTS[letter] for letter in arguments])((name, loaded))


def build(source: Path, compiler: str, flags: list[str]) -> Path:
    """The library for this processor, from an earlier build if nothing has changed since.

    Several may build at once: each writes a file of its own, which then takes its name in one step.
    Raises CalledProcessError if the compiler gives up, OSError if there is no room for the file.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, text=True).stdout
    recipe = [source.read_text(), SHARED.read_text(), version, processor(), *flags]
    built = BUILT / f"{hashlib.sha256(repr(recipe).encode()).hexdigest()[:20]}.so"
    if not built.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        part = built.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            command = [compiler, str(source), *flags, "-o", str(part)]
            subprocess.run(command, capture_output=True, check=True, text=True)
            part.replace(built)
        finally:
            part.unlink(missing_ok=True)
    return built


def processor() -> str:
    """What code for this very processor may depend on: where a folder is shared, another one must not run it."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    features = set(re.findall(r"^(?:model name|flags|CPU part|Features)\s*:.*$", text, re.M))
    return "\n".join([platform.machine(), platform.processor(), *sorted(features)])
