"""What a training loop measures: loss and gradient norm, which steps were not finite, and time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Meter:
    """Loss and gradient norm since the last reading, and which steps were bad: not finite, for no good reason.

    They stay on the device, since reading them synchronizes. `allowed` bad steps are skipped. It continues from `steps`
    and `loss`, the `unread_loss` of an earlier one.
    """

    def __init__(self, device: torch.device, allowed: int = 0, steps: int = 0, loss: float = 0.0):
        self.steps = torch.tensor(steps, dtype=torch.int64, device=device)
        self.loss = torch.tensor(loss, dtype=torch.float32, device=device)
        self.grad_norm = torch.zeros((), device=device)
        self.allowed, self.bad = max(0, allowed), torch.zeros((), dtype=torch.int64, device=device)
        self.unread: dict[int, Tensor] = {}  # step -> whether it was bad

    def add(self, step: int, loss: Tensor, grad_norm: Tensor, bad: Tensor) -> Tensor:
        """Count a step. Returns whether there have been more bad steps than are allowed."""
        self.steps += ~bad
        self.loss += loss.masked_fill(bad, 0)
        self.grad_norm = grad_norm
        self.unread[step] = bad
        self.bad += bad
        return self.bad > self.allowed

    def bad_steps(self) -> list[int]:
        """The bad steps since the last call."""
        unread, self.unread = self.unread, {}
        bad = torch.stack(list(unread.values())).tolist() if unread else []
        return [step for step, is_bad in zip(unread, bad, strict=True) if is_bad]

    def unread_loss(self) -> tuple[int, float]:
        """Steps since the last reading without the bad ones, and the sum of their losses."""
        return int(self.steps), float(self.loss)

    def read(self) -> tuple[int, float, float]:
        """Steps since the last reading without the bad ones, their mean loss, and the last gradient norm."""
        steps = int(self.steps)
        loss = float(self.loss) / max(1, steps)
        self.steps.zero_()
        self.loss.zero_()
        return steps, loss, float(self.grad_norm)


class Clock:
    """Seconds of the whole run, and of training alone."""

    def __init__(self, seconds: float):
        self.started = time.perf_counter() - seconds
        self.lap_started = time.perf_counter()

    def seconds(self) -> float:
        """Seconds of the run, including those before it was resumed."""
        return time.perf_counter() - self.started

    def lap(self) -> float:
        """Seconds of training since the last call, without pauses."""
        now = time.perf_counter()
        lap, self.lap_started = now - self.lap_started, now
        return lap

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside from the lap."""
        began = time.perf_counter()
        yield
        self.lap_started += time.perf_counter() - began
