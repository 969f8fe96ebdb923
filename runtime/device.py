"""What the machine at hand can do: its device, the number formats it computes in, its peak speed."""

import contextlib
import ctypes
import platform
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]

# Peak dense bf16 speed in FLOP/s by card, from the makers' data sheets, for model FLOPs utilisation (MFU).
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "L4": 121e12,
    "L40S": 362e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
}


def keep_memory() -> None:
    """Have glibc keep freed memory for the next tensor: handing it back and taking it anew costs a fifth of a step.

    Does nothing where the C library is another one.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc and hasattr(libc, "mallopt"):
        trim_threshold, mmap_max = -1, -4  # names of settings in malloc.h
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)


def pick_device(name: str) -> torch.device:
    """The device `name` ("cpu", "cuda", "mps"), or the fastest there is for "auto".

    Raises ValueError for one that this machine lacks.
    """
    there_is = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, there in there_is.items() if there)
    if not there_is[name]:
        raise ValueError(f"--device {name}: torch {torch.__version__} finds none here; try --device cpu")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The format of matrix products: `name`, or for "auto" bfloat16 where the device computes in it, else float32.

    Raises ValueError for bfloat16 where the device could only imitate it.
    """
    if name == "auto":
        name = "bfloat16" if has_bfloat16(device) else "float32"
    if name == "bfloat16" and not has_bfloat16(device):
        raise ValueError(f"--dtype bfloat16: {describe(device)} does not compute in it; try --dtype float32")
    return getattr(torch, name)


def has_bfloat16(device: torch.device) -> bool:
    """Whether `device` multiplies matrices in bfloat16 by its own instructions."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        imitated = platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported()
        return torch.ops.mkldnn._is_mkldnn_bf16_supported() and not imitated
    return True


def compile_pays(device: torch.device, steps: int) -> bool:
    """Whether `torch.compile`, about a minute, is won back within so many steps: on a CPU seldom, so never unasked."""
    return device.type == "cuda" and steps >= 500 and find_spec("triton") is not None


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Matrix products in `dtype`; parameters, norms and the residual stream stay in float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def describe(device: torch.device) -> str:
    """The name of the card, or of the processor with the threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()} ({device.type}, {torch.get_num_threads()} threads)"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The card's peak in FLOP/s in half precision, or None where it is not known."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((PEAK_FLOPS[card] for card in sorted(PEAK_FLOPS, key=len, reverse=True) if card in name), None)


def peak_memory(device: torch.device) -> int:
    """Bytes in use at the peak: of the card's memory, else by this process as a whole (0 where nobody counts them)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
