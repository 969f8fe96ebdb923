"""Decoding with `torch.compile`: one graph, and on CUDA one CUDA graph, for every new token.

The shapes and the code of a step must not depend on how many tokens came before. So keys and values have the size of
the whole context, a mask hides the positions that are not filled yet, and the number of cached tokens is a tensor.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model import LayerCache, Llama, Rope, RopeTable
from runtime.machine import check_compile


class StaticCache(nn.Module, LayerCache):
    """Keys and values of one layer, whose shapes stay the same.

    The `length` tensor is shared by all layers and advanced by `CompiledLlama`. A module, because `torch.compile`
    takes the buffers of modules to stay where they are: a CUDA graph may then write to them.
    """

    keys: Tensor  # B K context D
    values: Tensor
    length: Tensor  # type: ignore[assignment]

    def __init__(self, context: int, length: Tensor):
        super().__init__()
        self.context, self.filled = context, False
        for name in ("keys", "values"):
            self.register_buffer(name, torch.empty(0))
        self.register_buffer("length", length)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens, B K T D. Returns those of the whole context, B K S D.

        Those of the first tokens are returned as they are: the rest of the context is empty.
        """
        first = not self.filled
        if first:
            batch, heads, _, head_dim = k.shape
            self.keys, self.values = (x.new_zeros(batch, heads, self.context, head_dim) for x in (k, v))
            self.filled = True
        positions = self.length + torch.arange(k.shape[2], device=k.device)
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        return (k, v) if first else (self.keys, self.values)

    def mask(self, new: int) -> Tensor | None:
        """Which positions each of `new` tokens may attend to, (new, S). None if nothing is cached: it is causal."""
        if not self.filled:
            return None
        positions = torch.arange(self.context, device=self.length.device)
        return positions <= self.length + positions[:new, None]


class StaticRope(Rope):
    """Accepts a start that is a tensor. Its value is not read, so nothing checks it against the context."""

    def forward(self, start: int | Tensor, length: int) -> RopeTable:
        positions = start + torch.arange(length, device=self.cos.device)
        return self.cos[positions], self.sin[positions]


class CompiledLlama(Llama):
    """A `Llama` whose steps of one token are compiled. The prompt runs through the plain model, in one pass."""

    step: Callable[[Tensor, list[LayerCache]], Tensor]

    def new_cache(self, tokens: int | None = None) -> list[LayerCache]:
        length = torch.zeros((), dtype=torch.int64, device=self.embed_tokens.weight.device)
        return [StaticCache(self.config.context, length) for _ in self.layers]

    def next_logits(self, tokens: Tensor, cache: list[LayerCache]) -> Tensor:
        """See `Llama.next_logits`. The caller must ensure that the tokens fit into the context."""
        first = cache[0]
        assert isinstance(first, StaticCache)
        step = self.step if tokens.shape[1] == 1 and first.filled else super().next_logits
        logits = step(tokens, cache)
        first.length += tokens.shape[1]  # shared by all layers
        return logits


def compile_decoding(model: Llama) -> None:
    """Make `model.next_logits` use compiled code, in place. The first token after a prompt waits for the compiler."""
    check_compile(device := model.embed_tokens.weight.device)
    model.__class__, model.rope.__class__ = CompiledLlama, StaticRope
    assert isinstance(model, CompiledLlama)
    plain_step = super(CompiledLlama, model).next_logits
    model.step = torch.compile(plain_step, mode="reduce-overhead" if device.type == "cuda" else None)
