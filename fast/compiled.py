"""Decoding with `torch.compile`: one graph, and on CUDA one CUDA graph, for every new token.

The shapes and the code of a step must not depend on how many tokens came before. So keys and values have space for all
tokens from the start, a mask hides the positions that are not filled yet, and the number of cached tokens is a tensor.
"""

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from machine.device import check_compile
from model import LayerCache, Llama

SMALLEST = 256  # tokens; a larger cache has a power of two, because each size is compiled


class StaticCache(nn.Module, LayerCache):
    """Keys and values of one layer, whose shapes stay the same.

    The `length` tensor is shared by all layers and advanced by `CompiledDecoder`. A module, because `torch.compile`
    takes the buffers of modules to stay where they are: a CUDA graph may then write to them.
    """

    keys: Tensor  # B K size D
    values: Tensor
    length: Tensor  # type: ignore[assignment]

    def __init__(self, size: int, length: Tensor):
        super().__init__()
        self.size, self.filled = size, False
        for name in ("keys", "values"):
            self.register_buffer(name, torch.empty(0))
        self.register_buffer("length", length)

    def positions(self, new: int) -> Tensor:  # type: ignore[override]
        """Nothing checks them against the size: the value of `length` is not read."""
        return self.length + torch.arange(new, device=self.length.device)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write the keys and values of new tokens, B K T D. Returns those of all positions, B K S D, and a mask.

        Those of the first tokens are returned as they are: the other positions are empty.
        """
        first, self.filled = not self.filled, True
        if not self.keys.numel():
            batch, heads, _, head_dim = k.shape
            self.keys, self.values = (x.new_zeros(batch, heads, self.size, head_dim) for x in (k, v))
        positions = self.positions(k.shape[2])
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        if first:
            return k, v, None
        return self.keys, self.values, torch.arange(self.size, device=k.device) <= positions[:, None]

    def reset(self) -> None:
        """Forget all tokens, in the same memory. Masked values are multiplied by 0, so they must be finite."""
        self.filled = False
        for tensor in (self.keys, self.values, self.length):
            tensor.zero_()


class Stream(list[StaticCache]):
    """The cache of a stream of tokens, a `StaticCache` for each layer. It is empty until the first tokens come."""

    size: int  # of each layer's cache, in tokens


class CompiledDecoder:
    """Generation with `model`: steps of one token are compiled, which the first waits for. The prompt runs plain.

    A new stream takes over the layers' caches of one that is gone, if it has the same size and batch size: a CUDA graph
    is recorded for addresses, and again for others.
    """

    def __init__(self, model: Llama):
        check_compile(device := model.embed_tokens.weight.device)
        self.model = model
        mode = "reduce-overhead" if device.type == "cuda" else None
        self.step = torch.compile(model.next_logits, mode=mode, dynamic=False)
        self.unused: dict[tuple[int, int], list[list[StaticCache]]] = defaultdict(list)

    def new_cache(self, tokens: int | None = None) -> Any:
        context = self.model.config.context
        stream = Stream()
        stream.size = min(context, max(SMALLEST, 1 << ((tokens or context) - 1).bit_length()))
        return stream

    @torch.inference_mode()
    def next_logits(self, tokens: Tensor, cache: Stream) -> Tensor:
        """See `Llama.next_logits`. The caller must ensure that the tokens fit into the cache."""
        if not cache:
            unused = self.unused[cache.size, len(tokens)]
            if not unused:
                length = torch.zeros((), dtype=torch.int64, device=tokens.device)
                unused.append([StaticCache(cache.size, length) for _ in self.model.layers])
            cache += unused.pop()
            for layer in cache:
                layer.reset()
            weakref.finalize(cache, unused.append, [*cache])
        layers, first = [*cache], cache[0]
        step = self.step if tokens.shape[1] == 1 and first.filled else self.model.next_logits
        logits = step(tokens, layers)
        first.length += tokens.shape[1]  # shared by all layers
        return logits
