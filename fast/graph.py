"""A training step as one CUDA graph: a small model then does not wait while its kernels are launched one by one.

No GPU has run this yet. Tests replay recorded operations on a CPU instead.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

PLAIN_STEPS = 3  # before the capture: they compile, and allocate what kernels and optimizers keep


class CapturedStep:
    """`step(inputs, targets, lr)`: first plain, then captured, then replayed with each batch and learning rate.

    The rate is a tensor in all of them, in fp32 as CUDA's fused AdamW needs it, so that all compute the same. What
    is returned stays as it is. The shapes of batches must not change. Dropout follows `torch.manual_seed`.
    """

    def __init__(self, step: Callable[..., dict[str, Tensor]], optimizers: Iterable[Optimizer], device: torch.device):
        self.step, self.plain, self.stream = step, PLAIN_STEPS, torch.cuda.Stream(device)
        self.graph = torch.cuda.CUDAGraph()
        self.inputs, self.outputs = list[Tensor](), dict[str, Tensor]()
        self.lr = torch.zeros((), device=device)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["capturable"] = True  # Muon always is

    def __call__(self, inputs: Tensor, targets: Tensor, lr: float) -> dict[str, Tensor]:
        self.lr.fill_(lr)
        if self.plain:
            self.plain -= 1
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            with torch.cuda.stream(self.stream):
                outputs = self.step(inputs, targets, self.lr)
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            return outputs
        if not self.inputs:
            self.inputs = [inputs.clone(), targets.clone()]
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.outputs = self.step(*self.inputs, self.lr)
        for static, given in zip(self.inputs, (inputs, targets), strict=True):
            static.copy_(given)
        self.graph.replay()
        return {name: output.clone() for name, output in self.outputs.items()}
