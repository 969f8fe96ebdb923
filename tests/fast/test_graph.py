"""The captured training step, on a CPU that records operations and repeats them, as a CUDA graph does."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from runtime.acceleration import captured_step
from runtime.flags import read_train
from runtime.run import open_run

SIZES = "--dim 32 --layers 2 --heads 4 --kv-heads 2 --context 16 --batch-size 4 --tokenizer bytes --dtype float32"


class Recorder(TorchDispatchMode):
    """Stands for `torch.cuda.CUDAGraph`. A replay repeats operations on the same memory.

    What recording changes is undone, and reading a value is an error, as in a capture.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        assert "_local_scalar_dense" not in str(func), "a value is read"
        if func._schema.is_mutable:
            for x in tensors((args, kwargs)):
                self.before.setdefault(id(x), (x, x.clone()))
        outputs = func(*args, **kwargs)
        if not func.is_view:
            self.calls.append((func, args, kwargs, tensors(outputs)))
        return outputs

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            for output, x in zip(outputs, tensors(func(*args, **kwargs)), strict=True):
                if output is not x:
                    output.copy_(x)


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@contextlib.contextmanager
def capture(graph: Recorder, stream: Any) -> Iterator[None]:
    with graph, torch.random.fork_rng(devices=[]):
        yield
    with torch.no_grad():
        for x, before in graph.before.values():
            x.copy_(before)


@pytest.mark.parametrize(
    "flags", ["--dropout 0.2", "--micro-batch-size 2 --optimizer adamw", "--placement ngpt --warmup 0", "--clip 0"]
)
def test_replayed_steps_are_those_of_the_plain_step(flags, text, tmp_path, monkeypatch):
    """To the bit, with the learning rate and the dropout of each step."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    others: dict[str, Any] = {"Stream": lambda device: stream, "current_stream": lambda: stream, "graph": capture}
    others |= {"stream": lambda stream: contextlib.nullcontext(), "CUDAGraph": Recorder}
    for name, value in others.items():
        monkeypatch.setattr(torch.cuda, name, value)
    command = f"{SIZES} --data {text} --cache-dir {tmp_path} --steps 9 --device cpu {flags} --out {tmp_path}/"

    def trained(name: str, captured: bool) -> train.Trainer:
        trainer = train.Trainer(open_run(read_train(f"{command}{name}".split()), []))
        plain = trainer.update_on
        trainer.update = lambda inputs, targets, lr: plain(inputs, targets, torch.tensor(lr))
        if captured:
            trainer.update = captured_step(plain, trainer.optimizers, torch.device("cpu"), captured)
        for trainer.step in range(9):
            trainer.train_step()
        return trainer

    captured, plain = trained("captured", True), trained("plain", False)
    step: Any = captured.update
    assert len(step.graph.calls) > 300 and step.plain == 0
    assert captured.pending == plain.pending
    for found, expected in zip(captured.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(found, expected)
