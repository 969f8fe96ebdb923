"""What the machine computes on: devices, dtypes, memory, and what torch.compile needs."""

import contextlib
import ctypes
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from files import BadInput, require, warn

# --- devices ---------------------------------------------------------------------------------------------------------


def pick_device(name: str) -> torch.device:
    """The device `name` ("cpu", "cuda", "cuda:1", "mps"), or the fastest available one for "auto"."""
    if not re.fullmatch("auto|cpu|mps|cuda(:(0|[1-9][0-9]*))?", name):
        raise ValueError(f"--device {name!r}: choose auto, cpu, cuda, mps, or one of several GPUs, such as cuda:1")
    if name == "auto":
        name = next(device for device in ("cuda", "mps", "cpu") if has_device(device))
        if name == "cpu" and (reason := unused_gpu()):
            warn(f"warning: {reason}")
    device = torch.device(name)
    if not has_device(name):
        reason = (device.type == "cuda" and unused_gpu()) or f"torch {torch.__version__} finds no such device"
        raise ValueError(f"--device {name}: {reason}; try --device cpu")
    if device.type == "cuda":
        check_kernels(device)
    return device


def has_device(name: str) -> bool:
    """Whether this machine has the device `name`, such as "cuda:1"; "auto" always."""
    device_type, _, index = name.partition(":")
    if device_type == "cuda":
        return torch.cuda.is_available() and int(index or 0) < torch.cuda.device_count()
    return device_type != "mps" or torch.backends.mps.is_available()


def unused_gpu() -> str:
    """Why torch does not use this machine's GPU. Empty if it has none or the user has hidden it."""
    nvidia = shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists()
    used_or_hidden = torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if used_or_hidden or not (nvidia or Path("/dev/kfd").exists()):
        return ""
    brand, build = ("NVIDIA", torch.version.cuda) if nvidia else ("AMD", torch.version.hip)
    reason = f"finds no driver for version {build} of its libraries" if build else "is not built for it"
    return f"this machine has an {brand} GPU, but torch {torch.__version__} {reason}: see docs/gpu.md"


def check_kernels(device: torch.device) -> None:
    """Raise ValueError if this build of torch has no kernels for the GPU. Torch's own warning says which build has."""
    if not torch.version.cuda:  # ROCm, whose cards have no such number
        return
    major, minor = torch.cuda.get_device_capability(device)
    compiled = re.findall(r"(sm|compute)_(\d+)", " ".join(torch.cuda.get_arch_list()))
    earlier = [(kind, int(number) // 10) for kind, number in compiled if int(number) <= 10 * major + minor]
    # Machine code (sm) runs on later cards of the same generation, PTX (compute) on all later ones.
    found = any(kind == "compute" or generation == major for kind, generation in earlier)
    lacks = f"torch {torch.__version__} has no kernels for it: see docs/gpu.md, or use --device cpu"
    require(found, f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and {lacks}")


# --- dtypes and kernels ----------------------------------------------------------------------------------------------


def pick_dtype(name: str, device: torch.device, shard: bool = False) -> torch.dtype:
    """The dtype of matrix products: `name`, or for "auto" what is fast on such a device."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):  # is_bf16_supported asks the current device
            return torch.bfloat16
        return torch.float32 if shard else torch.float16  # sharded training has no loss scale
    # On MPS, bfloat16 is emulated on M1 and M2, and slower on later ones.
    return torch.bfloat16 if device.type == "cpu" and fast_bfloat16() else torch.float32


def fast_bfloat16() -> bool:
    """Whether products in bfloat16 take at most two thirds of the time of those in float32 on this processor.

    They do with AMX, and with AVX-512's instructions for bfloat16 on an AMD; an Intel with only these is slower.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    words = set(cpuinfo.read_text("utf-8", "replace").split())
    return "amx_bf16" in words or {"avx512_bf16", "AuthenticAMD"} <= words


def set_up_cpu() -> None:
    """Settings of this process for computing on a CPU. Call it before any other function of torch."""
    torch.set_flush_denormal(True)  # numbers below 1e-38, as in confident softmaxes, take up to 190 times longer
    torch.set_num_threads(torch.get_num_threads())  # whether it was called may change the last digits
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # Keep freed memory: returning it to the kernel and faulting it in again costs up to a third of a step.
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD


def autocast(device: torch.device, dtype: torch.dtype, cache: bool = False) -> contextlib.AbstractContextManager:
    """Matrix products in `dtype`, all else in float32. `cache` keeps copies of the weights, for several passes."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=cache)


def to_device(ids: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`. Python does not wait for it on CUDA, where copies from pinned memory are asynchronous."""
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and ids.is_cpu else ids.to(device)


def start_reading(x: Tensor) -> Callable[[], list]:
    """Start copying a CUDA tensor. Returns a function that waits for the copy, but not for later work, and reads it."""
    copy = x.to("cpu", non_blocking=True)  # pinned memory
    copied = torch.cuda.current_stream(x.device).record_event()
    return lambda: copied.synchronize() or copy.tolist()  # synchronize returns None


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Whether only deterministic kernels are used inside. Where CUDA has none, torch raises RuntimeError."""
    if enabled:  # cuBLAS reads this when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def describe(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search("model name\\s*: (.+)", cpuinfo.read_text("utf-8", "replace") if cpuinfo.exists() else "")
    processor = found[1] if found else platform.processor() or platform.machine()
    return f"{processor} ({device.type}, {torch.get_num_threads()} threads)"


def peak_memory(device: torch.device) -> int:
    """Peak bytes of the GPU's memory, or of this process on other devices (0 on Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- what torch.compile needs ----------------------------------------------------------------------------------------


def missing_for_compile(device: torch.device) -> str:
    """What `torch.compile` needs on `device` and this machine lacks, or nothing."""
    if device.type == "cuda" and not find_spec("triton"):
        return "the package triton"
    variable, usual = "CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    if device.type == "cuda":
        variable, usual = "CC", "gcc clang"  # for Triton
    compilers = os.environ.get(variable, usual).split()
    if not any(map(shutil.which, compilers)):
        return f"a compiler: {' or '.join(compilers)}, or one that {variable} names"
    header = Path(sysconfig.get_path("include"), "Python.h")  # the generated code includes it
    return "" if header.exists() else f"Python's headers, which are not in {header.parent}"


def check_compile(device: torch.device, required: bool = True) -> bool:
    """Whether this machine has what `torch.compile` needs. If not, raise BadInput if it is `required`, else warn."""
    missing = missing_for_compile(device)
    if missing and required:
        raise BadInput(f"--compile needs {missing}; or use --no-compile")
    if missing:
        warn(f"not compiled: torch.compile needs {missing}")
    # All models share one code object, of which torch compiles 8 versions and runs the others eagerly.
    torch.compiler.config.recompile_limit = 256
    return not missing
