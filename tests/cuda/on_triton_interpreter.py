"""Compiles models with Inductor's Triton backend and runs the kernels on a CPU, in Triton's interpreter.

TRITON_INTERPRET=1 PYTHONPATH=.:tests python tests/cuda/on_triton_interpreter.py

Prints {model: {"kernels": number, "errors": {tensor: [eager, compiled, between]}}} as JSON. `eager` and `compiled` are
errors in fp32 against float64, `between` is their difference, all relative to the largest element of the tensor.
"""

import json
from collections.abc import Callable
from math import erf
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from test_compile import SIZES, TOKENS, random_weights_model, training_step
from torch import Tensor
from torch._inductor import config as inductor
from triton.backends.compiler import GPUTarget
from triton.language.extra import libdevice
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from config import ModelConfig
from norms import KINDS
from norms.placement import PLACEMENTS

MODELS = [(kind, "pre") for kind in KINDS] + [("rmsnorm", name) for name in PLACEMENTS if name != "pre"]
NORM_ARGS: dict[str, dict] = {"powernorm": {"warmup": 1}, "prmsnorm": {"p": 0.5}}  # p of 2 features is ill-conditioned
LIBDEVICE: dict[str, Callable] = {"exp": np.exp, "rsqrt": lambda x: x**-0.5, "tanh": np.tanh, "erf": np.vectorize(erf)}
kernels_run: list[GridExecutor] = []


def run_and_record(kernel: GridExecutor, *args: Any, run: Callable = GridExecutor.__call__, **options: Any) -> None:
    kernels_run.append(kernel)
    run(kernel, *args, **options)


def in_numpy(function: Callable) -> Callable:
    """A libdevice function for the interpreter, in which those that are missing return None."""

    def call(x: tl.tensor) -> tl.tensor:
        return tl.tensor(TensorHandle(function(x.handle.data).astype(x.handle.data.dtype), x.dtype.scalar), x.type)

    return call


def broadcast(builder: InterpreterBuilder, x: TensorHandle, shape: list[int]) -> TensorHandle:
    """A copy: the interpreter of Triton 3.7.1 drops atomic additions whose mask is a view of one element."""
    return TensorHandle(np.broadcast_to(x.data, shape).copy(), x.dtype.scalar)


def training(kind: str, placement: str, dtype: torch.dtype, compiled: bool = False) -> dict[str, Tensor]:
    """Loss, gradients and buffers of two steps. PowerNorm is past its warmup at the second."""
    config = ModelConfig(**SIZES, norm=kind, placement=placement, norm_args=NORM_ARGS.get(kind, {}))
    model = random_weights_model(config).to(dtype)
    loss = torch.compile(model.loss, fullgraph=True) if compiled else model.loss
    found: dict[str, Tensor] = {}
    for step in range(len(TOKENS)):
        value, tensors = training_step(model, loss, step, torch.float32)
        for name, tensor in {"loss": value, **tensors}.items():
            found[f"step {step}: {name}"] = tensor.to(torch.float64, copy=True)
    return found


def compare(kind: str, placement: str) -> dict[str, Any]:
    torch.compiler.reset()
    kernels_run.clear()
    exact, eager = training(kind, placement, torch.float64), training(kind, placement, torch.float32)
    compiled, errors = training(kind, placement, torch.float32, compiled=True), {}
    for name, tensor in exact.items():
        differences = (eager[name] - tensor, compiled[name] - tensor, compiled[name] - eager[name])
        errors[name] = [(difference.abs().max() / tensor.abs().max()).item() for difference in differences]
    return {"kernels": len(kernels_run), "errors": errors}


if __name__ == "__main__":
    torch.set_num_threads(1)
    inductor.cpu_backend, inductor.compile_threads = "triton", 1
    # A driver that only names the target: nothing is compiled for it.
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 80, 32)))
    GridExecutor.__call__, InterpreterBuilder.create_broadcast = run_and_record, broadcast
    for name, function in LIBDEVICE.items():
        setattr(libdevice, name, in_numpy(function))
    results = {f"{kind} {placement}": compare(kind, placement) for kind, placement in MODELS}
    libdevice.rsqrt = in_numpy(lambda x: 1.00001 * x**-0.5)
    results["planted"] = compare("rmsnorm", "pre")
    print(json.dumps(results))
