"""The kernels: `decode.c`, built at first use and loaded, and the check whether they apply."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

SOURCE = Path(__file__).with_name("decode.c")
FLAGS = ["-O3", "-fPIC", "-shared", "-fno-strict-aliasing", "-fno-math-errno", "-Wno-psabi"]
INSTRUCTIONS = {  # by the capability that torch reports, which ATEN_CPU_CAPABILITY can lower
    "AVX2": ["-march=haswell"],
    "AVX512": ["-march=skylake-avx512", "-mprefer-vector-width=512"],
}
# Without an OpenMP library of its own, the kernels run on the threads of the one that torch has loaded.
# A compiler without OpenMP gives kernels that run on one thread.
THREADS = ["-fopenmp", "-nostdlib"], ["-Wno-unknown-pragmas", "-lm"]
PADDING = 16  # floats of the widest vector: scratch memory is padded for kernels that work in whole vectors
FUNCTIONS = {  # arguments: i is int64_t, f is float, p is a pointer
    "linear": "iiiippp",
    "project": "iiiiippppppp",
    "mlp": "iiiiipppppp",
    "attend": "iiiiiiiiifpppppppppp",
}
ARGUMENTS = {"i": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}

# Private functions of torch: no public one tells whether operations are recorded or transformed, or whether there are
# hooks for all modules. If this torch lacks one of them, there are no kernels.
transforms_active: Any = getattr(torch._C, "_are_functorch_transforms_active", None)
modes_active: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
any_global_hook: Any = getattr(nn_module, "_has_any_global_hook", None)


def unavailable() -> str | None:
    """Why there are no kernels here, in a few words; None if there are."""
    return load()[1]


def kernels() -> ctypes.CDLL:
    """The functions of `decode.c`. Ask `supported` first."""
    library, _ = load()
    assert library
    return library


@cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """The kernels, or None and the reason."""
    if None in (transforms_active, modes_active, any_global_hook):
        return None, f"torch {torch.__version__} cannot report whether its operations are recorded"
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() not in ("x86_64", "AMD64") or capability not in INSTRUCTIONS or os.name == "nt":
        return None, f"kernels need Linux or macOS and AVX2 or AVX-512; torch uses {capability}"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, "no C compiler (cc, gcc or clang) was found"
    for threads in THREADS:
        try:
            library = ctypes.CDLL(str(build(compiler, FLAGS + INSTRUCTIONS[capability] + threads)))
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().partition("\n")[0]
            continue
        for name, letters in FUNCTIONS.items():
            getattr(library, name).argtypes = [ARGUMENTS[letter] for letter in letters]
            getattr(library, name).restype = None
        return library, None
    return None, f"{compiler} could not build the kernels: {reason}"


def build(compiler: str, flags: list[str]) -> Path:
    """The shared library in the user's cache, from an earlier build if nothing has changed since.

    Processes may build at the same time: each writes its own file, then renames it.
    Raises CalledProcessError if the compiler fails, OSError if the cache cannot be written to.
    """
    run = partial(subprocess.run, capture_output=True, check=True, text=True, errors="replace")
    recipe = [run([compiler, "--version"]).stdout, *flags, SOURCE.read_text("utf-8")]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "normal-llama")
    library = directory / f"{hashlib.sha256(repr(recipe).encode()).hexdigest()[:20]}.so"
    if not library.exists():
        directory.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}.part")
        run([compiler, str(SOURCE), *flags, "-o", str(part)])
        part.replace(library)
    return library


def supported(*tensors: Tensor) -> bool:
    """Whether the kernels support these tensors: contiguous ones in fp32 or bf16 on a CPU, in inference mode.

    False while torch.compile, export, jit.trace, make_fx, torch.func or a hook for all modules is active, because
    kernels are opaque to them.
    """
    if not torch.is_inference_mode_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if load()[0] is None or transforms_active() or modes_active() or any_global_hook():
        return False
    return all(
        (type(x) is Tensor or type(x) is nn.Parameter)
        and (x.dtype is torch.float32 or x.dtype is torch.bfloat16)
        and x.is_cpu
        and x.layout is torch.strided
        and x.is_contiguous()
        for x in tensors
    )
