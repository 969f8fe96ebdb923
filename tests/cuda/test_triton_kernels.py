"""Inductor's Triton kernels without a GPU: losses, gradients and buffers in fp32, of each norm and each placement.

Needs `pip install triton==3.7.1 --no-deps`, and takes minutes. It does not cover matrix products and attention, which
are the CPU's; PTX, TF32 and libdevice, whose functions are NumPy's; bf16, which the interpreter truncates; and what
Inductor decides for a GPU: it lowers, fuses and picks block sizes for a CPU.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from norms import KINDS
from norms.placement import PLACEMENTS


def inexact(errors: dict[str, list[float]]) -> list[str]:
    """Where compiled has over 4 times the error that eager has in any tensor, or for losses, in either loss."""
    largest = [max(error[0] for name, error in errors.items() if ("loss" in name) == loss) for loss in (False, True)]
    return [name for name, error in errors.items() if not error[1] <= 4 * max(2**-23, largest["loss" in name])]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_compiled_training_is_as_exact_as_eager(tmp_path):
    """Compared with float64. The error planted in rsqrt, 1e-5, is found."""
    variables = {"TRITON_INTERPRET": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": ".:tests"}
    command = [sys.executable, "tests/cuda/on_triton_interpreter.py"]
    root, environment = Path(__file__).parents[2], os.environ | variables
    results = json.loads(subprocess.check_output(command, cwd=root, env=environment))
    assert len(inexact(results.pop("planted")["errors"])) > 40
    assert len(results) == len(KINDS) + len(PLACEMENTS) - 1
    assert min(result["kernels"] for result in results.values()) > 40, "each model runs dozens of Triton kernels"
    for model, result in results.items():
        assert not inexact(result["errors"]), model
