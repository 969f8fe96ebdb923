"""Counts the kernel launches of a training step on an H100, eager and compiled, without a card.

    python -m experiments.launches LIBRARY [PRESET]

Needs a CPU build of torch, the package triton, and LIBRARY, which lets autograd accept fake tensors on "cuda": a device
guard and CUDA hooks that do nothing. Inductor generates its code for sm_90, and the launches in it are counted. Nothing
is executed. Attention is the flash kernel, which a card would choose for the presets in bfloat16.
"""

import ctypes
import dataclasses
import re
import sys
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before torch

import torch
from torch import Tensor, nn

# Private: torch has no public way to generate code for a card that is absent, or to read that code. There is no
# fallback; this script measures one version of torch, and only its test imports it.
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from config import PRESETS, ModelConfig
from model import Llama
from runtime.plan import Trace

CARD = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip


def pretend_card() -> None:
    """Make torch, Inductor and Triton believe in an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    torch_cuda = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: CARD.name,
        "get_device_properties": lambda device=None: CARD,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "synchronize": lambda device=None: None,
    }
    interface: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: CARD,
        "get_compute_capability": lambda device=None: 90,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
    }
    for name, function in torch_cuda.items():
        setattr(torch.cuda, name, function)
    for name, function in interface.items():
        setattr(CudaInterface, name, staticmethod(function))
    setattr(CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: CARD))  # noqa: B010
    # Without a driver, a tensor of Python values cannot be made on the card.
    setattr(FakeTensorMode, "avoid_device_init", property(lambda self: True, lambda self, value: None))  # noqa: B010
    setattr(F, "scaled_dot_product_attention", flash_attention)  # noqa: B010
    inductor_config.joint_graph_constant_folding = False  # it would make real tensors on the card
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, is_causal: bool, **_: Any) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) if q.shape != x.shape else x for x in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def launches(code: str) -> int:
    """Launches in the function `call` of Inductor's code: Triton kernels, matrix products, and attention."""
    body = "\n".join(line for line in code[code.index("def call(") :].splitlines() if not line.lstrip().startswith("#"))
    triton, extern = re.findall(r"triton_\w+\.run\(", body), re.findall(r"extern_kernels\.\w+\(", body)
    return len(triton) + len(extern) + len(re.findall(r"= torch\.ops\.aten\.\w+\.default\(", body))


def count_compiled(counts: list[int]) -> Any:
    """A backend of `torch.compile` that appends the launches of forward, then of backward, to `counts`."""

    def partition(joint: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
        compile_fx._recursive_joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, *args, **options)

    def lower(graph: torch.fx.GraphModule, inputs: list) -> Any:
        mode: Any = detect_fake_mode(inputs)
        with V.set_fake_mode(mode):
            compile_fx.fake_tensor_prop(graph, inputs)
            compile_fx._recursive_post_grad_passes(graph)
            lowering = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env)
            with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
                lowering.run(*inputs)
                code: Any = lowering.codegen()[0]
        counts.append(launches(getattr(code, "value", code)))

        def run(args: list) -> Any:
            return torch.fx.Interpreter(graph).run(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Any:
        compiler: Any = lower
        decompositions = compile_fx.select_decomp_table()
        return aot_module_simplified(
            graph, inputs, compiler, compiler, partition, decompositions, keep_inference_input_mutations=True
        )

    return backend


def training_step(preset: str, layers: int, compiled: bool) -> tuple[int, int]:
    """Launches of the forward and backward of one micro-batch, in bfloat16 autocast."""
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    sizes = {name: value for name, value in PRESETS[preset].items() if name in names} | {"layers": layers}
    counts: list[int] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model = Llama(ModelConfig(**sizes))
        model.rope.cos, model.rope.sin = (
            nn.Buffer(x.to("cuda"), persistent=False) for x in (model.rope.cos, model.rope.sin)
        )
        shape = PRESETS[preset].get("micro_batch_size", 8), model.config.context
        tokens = torch.zeros(shape, dtype=torch.int64, device="cuda")
        loss = torch.compile(model.loss, backend=count_compiled(counts), fullgraph=True) if compiled else model.loss
        with torch.autocast("cuda", torch.bfloat16):
            if compiled:
                loss(tokens, tokens).backward()
                return counts[0], counts[1]
            with Trace() as trace:
                value = loss(tokens, tokens)
                forward = len(trace.launches)
                value.backward()
    return forward, len(trace.launches) - forward


def main() -> None:
    pretend_card()
    preset = sys.argv[2] if len(sys.argv) > 2 else "124m"
    print("| | forward | backward | per block | whole step |\n|---|---|---|---|---|")
    for compiled in (False, True):
        one, two = (training_step(preset, layers, compiled) for layers in (1, 2))
        block = [b - a for a, b in zip(one, two, strict=True)]
        depth = PRESETS[preset]["layers"]
        total = sum(one) + (depth - 1) * sum(block)
        print(
            f"| {'compiled' if compiled else 'eager'} | {block[0]} | {block[1]} | {sum(block)} | {total} |", flush=True
        )


if __name__ == "__main__":
    main()
