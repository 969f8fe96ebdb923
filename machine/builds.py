"""What torch lacks on this machine: why it does not use the GPU that is there, and what torch.compile needs."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from files import BadInput

# --- a GPU that torch does not use -----------------------------------------------------------------------------------

# PyTorch's build for a major version of CUDA, and the oldest driver that runs it. cu126 has sm_50 to sm_90.
BUILDS = {"12": ("cu126", 525), "13": ("cu130", 580)}


def install(build: str) -> str:
    """The command for a build of this version of torch. If it did not name it, pip would keep what is installed."""
    version = torch.__version__.partition("+")[0].partition(".dev")[0]
    return f"pip install torch=={version}+{build} --index-url https://download.pytorch.org/whl/{build}"


def unused_gpu() -> str:
    """Why torch does not use this machine's GPU, and what helps. Empty if it has none or the user has hidden it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    if not torch.version.hip and (shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists()):
        version, cuda = nvidia_driver(), torch.version.cuda or "none"
        driver = int(version.partition(".")[0] or 0)
        _, needed = BUILDS.get(cuda.partition(".")[0], ("", 0))
        builds = [install(build) for build, oldest in BUILDS.values() if driver >= oldest]
        advice = ["does nvidia-smi list it?"]
        if driver and cuda == "none":
            advice = builds[-1:] or ["update the driver"]
        elif 0 < driver < needed:
            advice = [f"update the driver to {needed} or later", *builds]
        found = f"torch {torch.__version__} (CUDA {cuda}) does not use this machine's NVIDIA GPU"
        return f"{found} (driver {version or 'unknown'}): {', or '.join(advice)}"
    if Path("/dev/kfd").exists():
        hint = "are you in the groups render and video?" if torch.version.hip else "pytorch.org/get-started has ROCm"
        return f"torch {torch.__version__} does not use this machine's AMD GPU: {hint}"
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
    architectures = " ".join(torch.cuda.get_arch_list())
    built = [int(number) for number in re.findall(r"sm_(\d+)", architectures)]
    major, minor = torch.cuda.get_device_capability(device)
    newer = major > max(built, default=999) // 10 and "compute_" not in architectures
    if newer or 10 * major + minor < min(built, default=0):
        supported = f"torch {torch.__version__} supports {min(built) / 10} to {max(built) / 10}"
        other = f"{install('cu130' if newer else 'cu126')}, or use --device cpu"
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"{name} has compute capability {major}.{minor}, and {supported}: {other}")


# --- what torch.compile needs ----------------------------------------------------------------------------------------


def missing_for_compile(device: torch.device) -> str:
    """What `torch.compile` needs on `device` and this machine lacks, or nothing."""
    if device.type == "cuda" and not find_spec("triton"):
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
