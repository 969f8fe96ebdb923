"""Builds `decode.c` at first use, in the user's cache, and loads it."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("decode.c")
# Without a library of its own, the code runs on the threads of the OpenMP library that torch has loaded.
FLAGS = ["-O3", "-fPIC", "-shared", "-fno-strict-aliasing", "-fno-math-errno", "-fopenmp", "-nostdlib", "-lm"]
DTYPES = {torch.float32: "-DBF16=0", torch.bfloat16: "-DBF16=1"}  # dtype of the matrices -> flag
# By the capability that torch reports, which ATEN_CPU_CAPABILITY can lower.
INSTRUCTIONS = {"AVX2": ["-march=haswell"], "AVX512": ["-march=skylake-avx512", "-mprefer-vector-width=512"]}


@cache
def load(dtype: torch.dtype) -> tuple[ctypes.CDLL | None, str | None]:
    """The library for matrices of `dtype`, or None and the reason in a few words."""
    if dtype not in DTYPES:
        return None, "fast/ needs --dtype float32 or bfloat16"
    capability = torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or capability not in INSTRUCTIONS:
        return None, f"fast/ needs Linux with AVX2 or AVX-512; torch uses {capability}"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None, "gcc was not found"
    try:
        library = ctypes.CDLL(str(build(compiler, [*FLAGS, *INSTRUCTIONS[capability], DTYPES[dtype]])))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().partition("\n")[0]
        return None, f"{compiler} could not build fast/{SOURCE.name}: {reason}"
    library.decode.argtypes = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
    return library, None


def build(compiler: str, flags: list[str]) -> Path:
    """The shared library, from an earlier build if nothing has changed since.

    Processes may build at the same time: each writes its own file, then renames it.
    Raises CalledProcessError if the compiler fails, and OSError or RuntimeError if the user has no cache to write to.
    """
    run = partial(subprocess.run, capture_output=True, check=True, errors="replace")
    recipe = [run([compiler, "--version"]).stdout, *flags, SOURCE.read_text("utf-8")]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "normal-llama")
    library = directory / f"{hashlib.sha256(repr(recipe).encode()).hexdigest()[:20]}.so"
    if not library.exists():
        directory.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.urandom(8).hex()}.part")
        run([compiler, SOURCE, *flags, "-o", part])
        part.replace(library)
    return library
