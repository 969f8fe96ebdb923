"""A CUDA card without a card: tensors on "cuda" have shapes, dtypes and devices, and no values.

Import it first, in a process of its own whose first argument is the library that `card.cpp` makes. FakeTensorMode
raises where an operation mixes devices; `Waits` notes where Python would wait for the card.
"""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

assert "torch" not in sys.modules, "the library must be loaded before torch"
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

# Private: torch has no public fake tensors.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


class FakeCard(FakeTensorMode):
    # Without a driver, `torch.tensor(..., device="cuda")` must be made on the CPU and copied.
    avoid_device_init = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]


NO_KERNEL = {"_unsafe_view", "_reshape_alias", "detach", "empty", "empty_like", "empty_strided", "new_empty", "device"}


class Waits(TorchDispatchMode):
    """Notes each operation after which Python waits for the card. To see where, raise an error in `note`.

    These are reading a value, an event, and every copy between devices unless it is `non_blocking`, and from pinned
    memory if it is to the card. A value that is read is 0.5, 0 or False. `launches` counts operations but views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.launches = 0

    def take(self) -> list[str]:
        """What was noted since the last call."""
        found, self.found = self.found, []
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func.namespace == "aten":
            with self:  # composite operations, such as `to`, are not yet decomposed there
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
            if on_card(args[0]):
                self.note("item")
            return placeholder(args[0])
        if name == "is_pinned":
            return is_pinned(args[0])
        if name == "_pin_memory":
            pinned = args[0].clone()
            pinned.is_on_pinned_memory = True
            return pinned
        out = func(*args, **kwargs)
        self.launches += not (func.is_view or name in NO_KERNEL)
        if name == "_to_copy":
            self.copied(args[0], out, kwargs.get("non_blocking", False))
        elif name == "copy_":
            self.copied(args[1], args[0], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        elif name in ("index", "index_put_") and any(on_card(i) != on_card(args[0]) for i in args[1] if i is not None):
            self.note("index from the CPU")
        return out

    def copied(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        if source.device.type != target.device.type and not (non_blocking and (on_card(source) or is_pinned(source))):
            self.note(f"copy from {source.device.type} to {target.device.type}")

    def note(self, what: str) -> None:
        self.found.append(what)


def on_card(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor, "is_on_pinned_memory", False)


PLACEHOLDERS: dict[torch.dtype, Any] = {torch.bool: False, torch.int64: 0}


def placeholder(tensor: Tensor) -> Any:
    return PLACEHOLDERS.get(tensor.dtype, 0.5)


def read_list(tensor: FakeTensor) -> list:
    """`tolist` is one copy. That of FakeTensor reads each element."""
    values = tensor.cpu()
    return [placeholder(values)] * values.numel()


def move(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """`module.to(device)`, which torch does not support for fake parameters. Shared parameters stay shared."""
    moved: dict[Tensor, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                new = nn.Parameter(weight.detach().to(device, dtype), weight.requires_grad)
                part._parameters[name] = moved.setdefault(weight, new)
        for name, buffer in part._buffers.items():
            part._buffers[name] = buffer.to(device) if buffer is not None else None
    return module


def on_real_data(function: Callable) -> Callable:
    """`function` with ordinary tensors, for what reads NumPy arrays."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return called


@contextlib.contextmanager
def fake_card() -> Iterator[Waits]:
    """Inside, "cuda" is a card whose tensors are fake. Real CPU tensors become fake ones when they are used."""
    with FakeCard(allow_non_fake_inputs=True), Waits() as waits:
        event = SimpleNamespace(synchronize=lambda: waits.note("event"))
        torch.cuda.current_stream = lambda device: SimpleNamespace(record_event=lambda: event)  # type: ignore
        yield waits


Tensor.numpy = on_real_data(Tensor.numpy)  # type: ignore[method-assign]  # a real tensor would become fake
FakeTensor.tolist = read_list  # type: ignore[method-assign,assignment]
nn.Module.to = move  # type: ignore[method-assign,assignment]
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.is_bf16_supported = lambda including_emulation=True: True
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_name = lambda device=None: "NVIDIA H100 80GB HBM3"
torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(total_memory=16e9)  # type: ignore[assignment,return-value]
