"""One more token of each sequence in a single call of C: it costs what reading every weight once does, and little else.

Between two calls lies as much time as a few matrices take, since the caches of the processor are full of weights by
then. What a token takes is not written down a second time: the model's own blocks, placements and norms are run once on
`Value`s, which note every step on a `Tape`, and decode.c goes through the steps. A norm that is more, or less, than one
function of C is called in between.

Shapes: B sequences, C features of the stream, H query heads, K heads of keys and values, D features of a head.
"""

import ctypes
import math
import threading
import weakref
from collections.abc import Callable
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from native import function, library
from norms.calling import LANES, noted
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".c")
PRODUCT, ATTENTION, GATE, NORM, SUM, SCALE = range(6)  # the kinds of steps in decode.c
NORM_ARGUMENTS = (3, 5, 11)  # how many of them it can pass on


def in_use() -> str:
    """What computes one more token on a CPU here, in a few words."""
    loaded, how = library(SOURCE)
    return how if loaded else f"PyTorch, as {how}"


def available() -> bool:
    return library(SOURCE)[0] is not None


class OneMoreToken:
    """`model.next_logits`, by a tape where one token each of up to `most` sequences follows those in a cache.

    For all other tokens, and for a model that cannot be recorded, `model.next_logits` itself. It keeps no model alive.
    """

    def __init__(self, model: Any, most: int):
        self.model, self.most = weakref.proxy(model), most
        self.itself = partial(type(model).next_logits, self.model)
        self.rows = 0  # in the latest tape
        self.tape: Tape | None = None
        self.lock = threading.Lock()  # of what the tape works in

    @torch.no_grad()
    def __call__(self, tokens: Tensor, cache: Any = None) -> Tensor:
        rows, length = tokens.shape
        following = cache is not None and cache.length > 0 and cache.blocks[0].context == self.model.config.context
        if not following or length != 1 or not 0 < rows <= self.most:
            return self.itself(tokens, cache)
        with self.lock:
            if rows != self.rows:
                self.rows, self.tape = rows, recorded(self.model, rows)
            if self.tape is None:
                return self.itself(tokens, cache)
            self.tape.start.copy_(self.model.embed_tokens(tokens))
            self.tape.play(self.model.rope(cache.length, 1), cache.blocks)
            return self.tape.end[:, 0].clone()


# --- recording ---


class Unrecordable(Exception):
    """The model takes a step that decode.c does not know."""


def recorded(model: Any, rows: int) -> "Tape | None":
    """The tape of one more token of `model` for so many sequences, or None where it cannot be recorded."""
    tape = Tape(model.config.context)
    tape.start = tape.room(rows, 1, model.config.dim)
    try:
        x = model.placement.start(Value(tape, tape.start))
        for block in model.layers:
            x = block(x, None)
        tape.end = model.lm_head(model.finish(x)).data
    except Exception:  # of any kind, from a placement that takes values for tensors
        return None
    return tape


class Value:
    """A tensor of a token to come: what is done with it is noted on the tape, and `data` is where it will be."""

    def __init__(self, tape: "Tape", data: Tensor):
        self.tape, self.data = tape, data

    def __add__(self, other: "Value") -> "Value":
        if not isinstance(other, Value) or other.data.shape != self.data.shape:
            raise Unrecordable
        return self.tape.add(SUM, self, other)

    def __mul__(self, factor: float | Tensor) -> "Value":
        return self.tape.add(SCALE, self, factor=float(factor))  # which only one number can be turned into

    __rmul__ = __mul__

    def numel(self) -> int:
        return self.data.numel()

    def split(self, sizes: list[int], axis: int) -> "list[Value]":
        return [Value(self.tape, part) for part in self.data.split(sizes, axis)]

    def unflatten(self, axis: int, sizes: tuple[int, ...]) -> "Value":
        return Value(self.tape, self.data.unflatten(axis, sizes))

    def flatten(self, axis: int) -> "Value":
        return Value(self.tape, self.data.view(*self.data.shape[:axis], -1))

    def view_as(self, other: "Value") -> "Value":
        return Value(self.tape, self.data.view_as(other.data))


class Norm:
    """`module`, a norm, which a tape takes a step of."""

    def __init__(self, module: Any):
        self.itself = module.forward  # found before the module, whose call takes longer than a sum

    def __call__(self, x: Any) -> Any:
        return x.tape.norm(self.itself, x) if isinstance(x, Value) else self.itself(x)


class Attention:
    """`module`, a model's attention, by C for one more token of each sequence."""

    def __init__(self, module: Any):
        self.module = module

    def __call__(self, x: Any, rope: tuple[Tensor, Tensor], cache: Any = None) -> Any:
        module = self.module
        if isinstance(x, Value):
            return module.o_proj(x.tape.attention(*module.heads(x)))
        if cache is None or cache.length == 0 or x.shape[1] != 1:
            return module(x, rope, cache)
        tape = Tape(cache.context)
        y = tape.attention(*(Value(tape, part) for part in module.heads(x)))
        tape.play(rope, [cache])
        return module.o_proj(y.data)


class MLP:
    """`module`, a model's MLP, which a tape takes three steps of."""

    def __init__(self, module: Any):
        self.module, self.itself = module, module.forward

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, Value):
            return self.itself(x)
        both = self.module.gate_up(x)
        return self.module.down_proj(x.tape.add(GATE, both, width=both.data.shape[-1] // 2))


class Tape:
    """The steps of one more token of some sequences."""

    start: Tensor  # the token's embedding, B 1 C
    end: Tensor  # the logits

    def __init__(self, context: int):
        self.context = context
        self.steps: list[Step | Callable[[], Any]] = []
        self.kept: list[Any] = []  # what the steps point at
        self.caches: list[tuple[int, ...]] = []  # the shape of each layer's keys and values
        self.scores = self.room(0)  # where attention, of one layer after the other, works
        self.multiplications = 0

    def room(self, *shape: int) -> Tensor:
        """Memory for so many floats, and a vector more, which decode.c may read as well."""
        with torch.inference_mode(False):  # to be written to in any mode
            self.kept.append(torch.empty(math.prod(shape) + LANES, dtype=torch.float32, device="cpu"))
        return self.kept[-1][:-LANES].view(shape)

    def add(self, kind: int, x: Value, z: Value | None = None, width: int | None = None, **fields: Any) -> Value:
        """A step that makes a value of x, or of x and z; each of its rows is as wide as one of x, or `width`."""
        given = [value.data for value in (x, z) if value is not None]
        if not all(data.is_contiguous() for data in given):
            raise Unrecordable
        y = self.room(*x.data.shape[:-1], width or x.data.shape[-1])
        fields |= dict(zip("xzy", map(Tensor.data_ptr, (given[0], given[-1], y)), strict=True))
        self.steps.append(Step(kind, len(y), y.numel() // len(y), **fields))
        return Value(self, y)

    def product(self, by: "Product", x: Value) -> Value:
        self.kept.append(by)
        self.multiplications += len(x.data) * by.weight.numel()
        return self.add(PRODUCT, x, width=by.outputs, what=by.address)

    def norm(self, norm: Callable[[Tensor], Tensor], x: Value) -> Value:
        """`norm` of x: the one function of C that it calls, or else `norm` itself, between two calls of C."""
        some = torch.linspace(-1, 2, x.numel(), dtype=torch.float32, device="cpu").view_as(x.data)
        x.data.copy_(some)
        with noted() as calls:
            y = norm(x.data)
        if y is x.data:
            return x
        x.data.copy_(-300 * some.flip(-1))
        if len(calls) == 1 and len(calls[0].given) in NORM_ARGUMENTS:
            (call,) = calls
            call.function(*call.given)
            if torch.equal(y, norm(x.data)):  # so that call is all there is to it
                self.kept += [call, y]
                address = ctypes.cast(call.function, ctypes.c_void_p)
                self.steps.append(Step(NORM, what=address, count=len(call.given), given=tuple(call.given)))
                return Value(self, y)
        here, there = x.data, self.room(*y.shape)
        self.steps.append(lambda: there.copy_(norm(here)))
        return Value(self, there)

    def attention(self, q: Value, k: Value, v: Value) -> Value:
        """Of queries, B 1 H D, to keys and values, B 1 K D, and to those in the next layer's cache; B 1 H·D."""
        parts = [value.data for value in (q, k, v)]
        assert all(part[0].is_contiguous() and part.dtype == torch.float32 for part in parts)
        batch, _, heads, head_dim = q.data.shape
        kv_heads, each = k.data.shape[2], head_dim + self.context + LANES
        if self.scores.numel() < batch * heads * each:
            self.scores = self.room(batch * heads * each)
        y = self.room(batch, 1, heads * head_dim)
        addresses, strides = [part.data_ptr() for part in parts], [part.stride(0) for part in parts]
        sizes = batch, heads, kv_heads, head_dim, len(self.caches)
        job = AttentionJob(*addresses, *strides, *sizes, head_dim**-0.5, self.scores.data_ptr())
        self.steps.append(Step(ATTENTION, what=ctypes.addressof(job), y=y.data_ptr()))
        self.kept += [*parts, job]
        self.caches.append((batch, kv_heads, self.context, head_dim))
        self.multiplications += 2 * self.context * y.numel()
        return Value(self, y)

    def play(self, rope: tuple[Tensor, Tensor], caches: list[Any]) -> None:
        """Go through the steps, with cosines and sines of the new position, which every layer's cache then holds."""
        keys, values = [cache.keys for cache in caches], [cache.values for cache in caches]
        seen = caches[0].length if caches else 0
        assert seen < self.context and [x.shape for x in keys] == [x.shape for x in values] == self.caches
        assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (*rope, *keys, *values))
        addresses = [(ctypes.c_void_p * len(caches))(*map(Tensor.data_ptr, tensors)) for tensors in (keys, values)]
        tables = [table.data_ptr() for table in rope]
        place = Place(self.context, seen, *tables, *map(ctypes.addressof, addresses))
        run = function(SOURCE, "play", "pipi")
        for part in self.parts:
            if callable(part):
                part()
            else:
                run(part, len(part), ctypes.addressof(place), self.multiplications)
        for cache in caches:
            cache.length += 1

    @cached_property
    def parts(self) -> list[Any]:
        """The steps, those for C that follow each other in one array."""
        parts: list[Any] = []
        for for_c, steps in groupby(self.steps, lambda step: isinstance(step, Step)):
            several: list[Any] = list(steps)
            parts += [(Step * len(several))(*several)] if for_c else several
        return parts


# --- what decode.c is told ---


class Step(ctypes.Structure):
    """The `Step` of decode.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "rows", "width")),
        *((name, ctypes.c_void_p) for name in ("what", "x", "z", "y")),
        ("factor", ctypes.c_float),
        ("count", ctypes.c_int64),
        ("given", ctypes.c_int64 * NORM_ARGUMENTS[-1]),
    ]


class AttentionJob(ctypes.Structure):
    """The `Attention` of decode.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "head_dim", "layer")),
        ("scale", ctypes.c_float),
        ("room", ctypes.c_void_p),
    ]


class Place(ctypes.Structure):
    """The `Place` of decode.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("context", "seen")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "keys", "values")),
    ]


class ProductJob(ctypes.Structure):
    """The `Product` of decode.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "bits")),
        *((name, ctypes.c_void_p) for name in ("weight", "steps")),
    ]


class Product:
    """x Wᵀ in float32 for a few rows x, W (outputs, inputs) in float32, bfloat16, or int8 times `steps`, one a row."""

    def __init__(self, weight: Tensor, steps: Tensor | None = None):
        self.weight = weight.contiguous()
        self.steps = None if steps is None else steps.float().contiguous()
        self.outputs, self.inputs = weight.shape
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in (self.weight, self.steps))
        self.job = ProductJob(self.outputs, self.inputs, 8 * weight.itemsize, *addresses)
        self.address, self.function = ctypes.addressof(self.job), function(SOURCE, "product", "pipp")

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Value):
            return x.tape.product(self, x)
        assert x.dtype == torch.float32 and x.is_cpu
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], self.outputs)
        self.function(self.address, x.numel() // self.inputs, x.data_ptr(), y.data_ptr())
        return y
