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


class Streams:
    """Stands for the streams of a card, the current one and another, and records what waits for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.order: list[str] = []
        self.current, self.other = (self.stream(name) for name in ("current", "other"))
        others: dict[str, Any] = {"Stream": lambda device: self.other, "current_stream": lambda device: self.current}
        others |= {"stream": self.use, "graph": self.capture, "CUDAGraph": Recorder}
        for name, value in others.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def stream(self, name: str) -> SimpleNamespace:
        device = torch.device("cpu")
        return SimpleNamespace(device=device, name=name, wait_stream=lambda other: self.order.append(f"{name} waits"))

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        self.order.append(f"step on {stream.name}")
        yield

    @contextlib.contextmanager
    def capture(self, graph: Recorder, stream: Any) -> Iterator[None]:
        self.order.append(f"capture on {stream.name}")
        with graph, torch.random.fork_rng(devices=[]):
            yield
        with torch.no_grad():
            for x, before in graph.before.values():
                x.copy_(before)


@pytest.mark.parametrize("flags", ["--dropout 0.2", "--micro-batch-size 2 --optimizer adamw", "--placement ngpt"])
def test_replayed_steps_are_those_of_the_plain_step(flags, text, tmp_path, monkeypatch):
    """To the bit, with the learning rate and the dropout of each step."""
    streams = Streams(monkeypatch)
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
    assert len(step.graph.calls) > 300
    assert streams.order == 3 * ["other waits", "step on other", "current waits"] + ["capture on other"]
    assert all(group["capturable"] for optimizer in captured.optimizers for group in optimizer.param_groups)
    assert captured.pending == plain.pending
    for found, expected in zip(captured.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(found, expected)
