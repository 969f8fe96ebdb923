"""The kernels: the C files of this folder, built at first use and loaded, and the check whether they apply."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
HEADER = Path(__file__).with_name("vectors.h")
FLAGS = ["-O3", "-fPIC", "-shared", "-fno-strict-aliasing", "-fno-math-errno", "-Wno-psabi"]
INSTRUCTIONS = {  # by the capability that torch reports, which ATEN_CPU_CAPABILITY can lower
    "AVX2": ["-march=haswell"],
    "AVX512": ["-march=skylake-avx512", "-mprefer-vector-width=512"],
}
# Without an OpenMP library of its own, the kernels run on the threads of the one that torch has loaded.
THREADS = {"on torch's threads": ["-fopenmp", "-nostdlib"], "on one thread": ["-Wno-unknown-pragmas", "-lm"]}
PADDING = 16  # floats of the widest vector: scratch memory is padded for kernels that work in whole vectors
FUNCTIONS = {  # arguments: i is int64_t, f is float, p is a pointer
    "norm_forward": "iiiiifpppp",
    "norm_backward": "iiiiifppppppp",
    "rotate_heads": "iiiiiiiifpppp",
    "causal_softmax": "iiifpp",
    "cross_entropy": "iiiipppp",
    "transpose_sum": "iiiiipppp",
    "linear": "iiiippp",
    "project": "iiiiippppppp",
    "mlp": "iiiiipppppp",
    "attend": "iiiiiiiiifpppppppppp",
}
ARGUMENTS = {"i": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}

# Private functions of torch: no public one tells whether operations are being traced or transformed. If this torch
# lacks one of them, there are no kernels.
transforms_active: Any = getattr(torch._C, "_are_functorch_transforms_active", None)
modes_active: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
is_batched: Any = getattr(getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", None)
forward_level: Any = getattr(forward_ad, "_current_level", None)


def unavailable() -> str | None:
    """Why there are no kernels here, in a few words; None if there are."""
    return load()[1]


def kernels() -> ctypes.CDLL:
    """The functions of the C files. Ask `supported` first."""
    library, _ = load()
    assert library
    return library


@cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """The kernels, or None and the reason."""
    if None in (transforms_active, modes_active, is_batched, forward_level):
        return None, f"torch {torch.__version__} cannot report whether its operations are being traced"
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() not in ("x86_64", "AMD64") or capability not in INSTRUCTIONS or os.name == "nt":
        return None, f"kernels need Linux or macOS and AVX2 or AVX-512; torch uses {capability}"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None, "no C compiler (cc, gcc or clang) was found"
    flags = FLAGS + INSTRUCTIONS[capability]
    if capability == "AVX512" and "avx512_bf16" in cpu_flags():
        flags.append("-mavx512bf16")
    reason = ""
    for cached in (True, False):  # in a temporary directory if the cache directory is not writable or executable
        for threads in THREADS.values():
            try:
                with nullcontext(cache_directory()) if cached else tempfile.TemporaryDirectory() as directory:
                    library = ctypes.CDLL(str(build(compiler, flags + threads, Path(directory))))
            except subprocess.CalledProcessError as error:
                reason = error.stderr.strip().partition("\n")[0]
            except OSError as error:
                reason = str(error)
            else:
                for name, letters in FUNCTIONS.items():
                    getattr(library, name).argtypes = [ARGUMENTS[letter] for letter in letters]
                    getattr(library, name).restype = None
                return library, None
    return None, f"{compiler} could not build the kernels: {reason}"


def build(compiler: str, flags: list[str], directory: Path) -> Path:
    """The shared library in `directory`, from an earlier build if nothing has changed since.

    Processes may build at the same time: each writes its own file, then renames it.
    Raises CalledProcessError if the compiler fails, OSError if `directory` cannot be written to.
    """
    recipe = [run(compiler, "--version"), *flags, *(source.read_text("utf-8") for source in (HEADER, *SOURCES))]
    library = directory / f"{hashlib.sha256(repr(recipe).encode()).hexdigest()[:20]}.so"
    if not library.exists():
        directory.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            run(compiler, *map(str, SOURCES), *flags, "-o", str(part))
            part.replace(library)
        finally:
            part.unlink(missing_ok=True)
    return library


def run(*command: str) -> str:
    """The output of a command, whatever its encoding. Raises CalledProcessError if it fails."""
    return subprocess.run(command, capture_output=True, check=True, text=True, errors="replace").stdout


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "normal-llama"


def cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def supported(*tensors: Tensor | None) -> bool:
    """Whether the kernels support these tensors: ordinary ones in fp32 or bf16 on a CPU.

    False while torch.compile, export, jit.trace, make_fx, torch.func, forward-mode AD or `is_grads_batched` is active,
    because kernels are opaque to them.
    """
    if (
        torch.compiler.is_compiling()
        or load()[0] is None
        or torch.jit.is_tracing()
        or transforms_active()
        or modes_active()
        or forward_ad._current_level >= 0
    ):
        return False
    for x in tensors:
        if x is not None and not (
            (type(x) is Tensor or type(x) is nn.Parameter)
            and (x.dtype is torch.float32 or x.dtype is torch.bfloat16)
            and x.is_cpu
            and x.layout is torch.strided
            and not x.is_neg()
            and not is_batched(x)
        ):
            return False
    return True


def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialized memory for a kernel."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def formula_gradients(formula: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad_y: Tensor) -> list[Any]:
    """The gradients of `inputs` by the formula, for double backward and for transforms."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    with torch.enable_grad():
        y = formula(*inputs)
    grads = torch.autograd.grad(y, wanted, grad_y, create_graph=torch.is_grad_enabled())
    by_id = dict(zip(map(id, wanted), grads, strict=True))
    return [by_id.get(id(x)) for x in inputs]
