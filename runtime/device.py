"""Hardware properties: devices, dtypes and peak speed."""

import contextlib
import ctypes
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from timeit import timeit

import torch
from torch import Tensor


@dataclass(frozen=True)
class Card:
    """A GPU's limits, from its vendor's data sheet."""

    flops: float  # dense bf16 FLOP/s
    bandwidth: float  # of the device memory, in bytes/s
    memory: float  # in bytes


CARDS = {  # by a part of their names in CUDA, except for case and hyphens
    "a100": Card(312e12, 2.039e12, 80e9),
    "h100-pcie": Card(756e12, 2.0e12, 80e9),
    "h100": Card(989e12, 3.35e12, 80e9),
    "h200": Card(989e12, 4.8e12, 141e9),
    "l4": Card(121e12, 0.3e12, 24e9),
    "l40s": Card(362e12, 0.864e12, 48e9),
    "rtx-3090": Card(71e12, 0.936e12, 24e9),
    "rtx-4090": Card(165e12, 1.008e12, 24e9),
}
FASTER = 1.5  # how many times faster bfloat16 must be to be chosen: it costs a little precision
# `torch.compile` takes about a minute, which shorter runs do not amortize.
COMPILE_STEPS = 500  # of a run on CUDA
COMPILE_FLOPS = 5e13  # of a run on a CPU: five to ten minutes on two cores


def pick_device(name: str) -> torch.device:
    """The device `name` ("cpu", "cuda", "cuda:1", "mps"), or the fastest available one for "auto"."""
    if not re.fullmatch("auto|cpu|mps|cuda(:(0|[1-9][0-9]*))?", name):
        raise ValueError(f"--device {name!r}: choose auto, cpu, cuda, mps, or one of several GPUs, such as cuda:1")
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device in available if available[device])
    kind, _, index = name.partition(":")
    if not available[kind]:
        raise ValueError(f"--device {name}: torch {torch.__version__} finds no such device; try --device cpu")
    if index and int(index) >= (count := torch.cuda.device_count()):
        raise ValueError(f"--device {name}: the last of this machine's GPUs is cuda:{count - 1}")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: `name`, or for "auto" the faster of bfloat16 and float32. A CPU is timed."""
    if name != "auto":
        return getattr(torch, name)
    faster = True
    if device.type == "cuda":
        faster = torch.cuda.get_device_capability(device) >= (8, 0)  # is_bf16_supported asks the current device
    elif device.type == "cpu":
        float32, bfloat16 = product_times()
        faster = float32 >= FASTER * bfloat16
    return torch.bfloat16 if faster else torch.float32


@cache
def product_times() -> list[float]:
    """Seconds for a matrix product on the CPU in float32 and in bfloat16, measured in about 10 ms, once per process.

    Instruction sets do not tell: with AVX-512's for bfloat16, a Xeon without AMX is slower, and an EPYC twice as fast.
    On a busy machine the threads of a product wait for each other, so it is measured on one.
    """
    operands = [torch.ones(256, 256, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rounds = [[timeit(partial(torch.mm, x, x), number=1) for x in operands] for _ in range(5)]
    torch.set_num_threads(threads)
    return [min(seconds) for seconds in zip(*rounds, strict=True)]


def measured_products() -> str:
    """What "auto" has measured on this CPU, to be printed after the dtype; nothing if the dtype was given."""
    if not product_times.cache_info().currsize:
        return ""
    float32, bfloat16 = (f"{1e3 * seconds:.2f} ms" for seconds in product_times())
    return f" (a matrix product takes {float32} in float32, {bfloat16} in bfloat16)"


def compile_by_default(device: torch.device, steps: int, step_flops: float) -> bool:
    """Whether a run of `steps`, each with so many FLOPs, uses `torch.compile` unless told otherwise."""
    if device.type == "cuda":
        return steps >= COMPILE_STEPS and find_spec("triton") is not None
    header = Path(sysconfig.get_path("include"), "Python.h")  # Inductor's C++ code includes it
    compiler = shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    return device.type == "cpu" and steps * step_flops >= COMPILE_FLOPS and header.exists() and compiler is not None


def set_up_cpu() -> None:
    """Settings of this process for computing on a CPU. Call it before any other function of torch."""
    torch.set_flush_denormal(True)  # numbers below 1e-38, as in confident softmaxes, take up to 190 times longer
    torch.set_num_threads(torch.get_num_threads())  # as `product_times` does, so results are the same
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # Keep freed memory: returning it to the kernel and faulting it in again costs up to a third of a step.
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Matrix products in `dtype`. Parameters, norms and the residual stream stay in float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def to_device(ids: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`. Python does not wait for it on CUDA, where copies from pinned memory are asynchronous."""
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids.to(device)


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


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The GPU's peak in FLOP/s in half precision, or None if it is unknown."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    cards = [card for card in CARDS if re.search(rf"\b{card}\b(?!-nvl)", name)]
    return CARDS[max(cards, key=len)].flops if cards else None


def peak_memory(device: torch.device) -> int:
    """Peak bytes of the GPU's memory, or of this process on other devices (0 on Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
