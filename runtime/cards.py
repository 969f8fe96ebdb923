"""GPUs: what their data sheets say, why torch does not use the one that is there, and what torch.compile lacks."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from files import BadInput


@dataclass(frozen=True)
class Card:
    """A GPU's limits. GeForce cards' FLOP/s follow from their float32, of which tensor cores do twice as many."""

    flops: float  # dense FLOP/s in bfloat16, or in float16 on a card without it, summed in float32
    float32: float  # FLOP/s without tensor cores
    bandwidth: float  # of the device memory, in bytes/s
    memory: float  # in bytes


CARDS = {  # by a part of their names in CUDA, except for case and hyphens
    "t4": Card(65e12, 8.1e12, 320e9, 16e9),
    "v100-pcie": Card(112e12, 14e12, 900e9, 16e9),
    "v100": Card(125e12, 15.7e12, 900e9, 16e9),
    "a10": Card(125e12, 31.2e12, 600e9, 24e9),
    "a100": Card(312e12, 19.5e12, 2039e9, 80e9),
    "h100-pcie": Card(756e12, 51e12, 2000e9, 80e9),
    "h100": Card(989e12, 67e12, 3350e9, 80e9),
    "h200": Card(989e12, 67e12, 4800e9, 141e9),
    "b200": Card(2250e12, 75e12, 7700e9, 180e9),
    "l4": Card(121e12, 30.3e12, 300e9, 24e9),
    "l40s": Card(362e12, 91.6e12, 864e9, 48e9),
    "rtx-3060": Card(25.4e12, 12.7e12, 360e9, 12e9),
    "rtx-3070": Card(40.6e12, 20.3e12, 448e9, 8e9),
    "rtx-3080": Card(59.5e12, 29.8e12, 760e9, 10e9),
    "rtx-3090": Card(71e12, 35.6e12, 936e9, 24e9),
    "rtx-4060": Card(30.2e12, 15.1e12, 272e9, 8e9),
    "rtx-4060-ti": Card(44.1e12, 22.1e12, 288e9, 8e9),
    "rtx-4070": Card(58.3e12, 29.1e12, 504e9, 12e9),
    "rtx-4080": Card(97.5e12, 48.7e12, 717e9, 16e9),
    "rtx-4090": Card(165e12, 82.6e12, 1008e9, 24e9),
    "rtx-5060": Card(38.4e12, 19.2e12, 448e9, 8e9),
    "rtx-5070": Card(61.7e12, 30.9e12, 672e9, 12e9),
    "rtx-5080": Card(113e12, 56.3e12, 960e9, 16e9),
    "rtx-5090": Card(210e12, 105e12, 1792e9, 32e9),
}
BEFORE_AMPERE = ("t4", "v100-pcie", "v100")  # without bfloat16 and TF32


def find_card(name: str) -> Card | None:
    """The card whose name in CUDA is `name`; None for one that is not listed, such as a slower one for laptops."""
    name = name.lower().replace(" ", "-")
    if "-mig-" in name:  # a part of a card
        return None
    found = [card for card in CARDS if re.search(rf"\b{card}\b(?!-(nvl|laptop|max-q|super|ti|d)\b)", name)]
    return CARDS[max(found, key=len)] if found else None


# --- a GPU that torch does not use -----------------------------------------------------------------------------------

# PyTorch's build for a major version of CUDA, and the oldest driver that runs it. cu126 has sm_50 to sm_90.
BUILDS = {"12": ("cu126", 525), "13": ("cu130", 580)}


def install(build: str) -> str:
    """The command for a build of this version of torch. If it did not name it, pip would keep what is installed."""
    version = torch.__version__.partition("+")[0].partition(".dev")[0]
    return f"pip install torch=={version}+{build} --index-url https://download.pytorch.org/whl/{build}"


@cache
def warn(line: str) -> None:
    """Print a line on standard error, once and on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def unused_gpu() -> str:
    """Why torch does not use this machine's GPU, and what helps. Empty if it has none or the user has hidden it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not hidden and not torch.version.hip and (shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists()):
        version, cuda = nvidia_driver(), torch.version.cuda or "none"
        driver, (_, needed) = int(version.partition(".")[0] or 0), BUILDS.get(cuda.partition(".")[0], ("", 0))
        builds = [install(build) for build, oldest in BUILDS.values() if driver >= oldest]
        advice = "does nvidia-smi list it?"
        if driver and cuda == "none":
            advice = builds[-1] if builds else "update the driver"
        elif 0 < driver < needed:
            advice = ", or ".join([f"update the driver to {needed} or later", *builds])
        found = f"torch {torch.__version__} (CUDA {cuda}) does not use this machine's NVIDIA GPU"
        return f"{found} (driver {version or 'unknown'}): {advice}"
    if not hidden and Path("/dev/kfd").exists():
        advice = "are you in the groups render and video?" if torch.version.hip else "pytorch.org/get-started has ROCm"
        return f"torch {torch.__version__} does not use this machine's AMD GPU: {advice}"
    return ""


@cache
def nvidia_driver() -> str:
    """The version of the NVIDIA driver, such as 535.183.01; nothing if it does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    numbers = re.search(r"\d{3}\.[\d.]+", found)
    return numbers[0] if numbers else ""


def check_capability(device: torch.device) -> None:
    """Raise ValueError if this GPU is older or newer than those that this build of torch has kernels for."""
    if not torch.version.cuda:  # ROCm, whose cards have no such number
        return
    built = [int(number) for number in re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))]
    major, minor = torch.cuda.get_device_capability(device)
    newer = major > max(built, default=999) // 10 and "compute_" not in " ".join(torch.cuda.get_arch_list())
    if newer or 10 * major + minor < min(built, default=0):
        supported = f"torch {torch.__version__} supports {min(built) / 10} to {max(built) / 10}"
        other = f"{install('cu130' if newer else 'cu126')}, or use --device cpu"
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"{name} has compute capability {major}.{minor}, and {supported}: {other}")


# --- what torch.compile needs ----------------------------------------------------------------------------------------


def missing_for_compile(device: torch.device) -> str:
    """What `torch.compile` needs on `device` and this machine lacks, or nothing."""
    if device.type == "cuda" and find_spec("triton") is None:
        return "the package triton"
    variable, compilers = "CC", ["gcc", "clang"]  # Triton's
    if device.type != "cuda":
        variable, compilers = "CXX", [{"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")]
    if not any(map(shutil.which, [os.environ[variable]] if variable in os.environ else compilers)):
        return f"a compiler: {' or '.join(compilers)}, or one that {variable} names"
    header = Path(sysconfig.get_path("include"), "Python.h")  # which the generated code includes
    return "" if header.exists() else f"Python's headers, which are not in {header.parent}"


def check_compile(device: torch.device) -> None:
    """Raise BadInput if this machine lacks what `torch.compile` needs."""
    if missing := missing_for_compile(device):
        raise BadInput(f"--compile needs {missing}; or use --no-compile")
