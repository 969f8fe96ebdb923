"""The parts of the model that use the kernels. Everything that these do not support falls back to `model.py`."""

from torch import Tensor

import fast.decode as decode
from fast.native import supported
from fast.training import causal_attention, linear_cross_entropy, rotate, targets_supported
from model import Attention, LayerCache, Llama, RopeTable, SwiGLU


class FastAttention(Attention):
    def forward(self, x: Tensor, rope: RopeTable, cache: LayerCache | None = None) -> Tensor:
        if cache is not None:
            y = decode.attention(self, x, rope, cache)
            return super().forward(x, rope, cache) if y is None else y
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # B T H D
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))  # B T K D
        v = self.v_norm(self.v_proj(x).unflatten(-1, (-1, self.head_dim)))  # B T K D
        q, k = self.rotated_q_norm(rotate(q, rope)), self.rotated_k_norm(rotate(k, rope))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = causal_attention(q, k, v, self.dropout.p if self.training else 0.0, self.grouped)  # B H T D
        return self.dropout(self.o_proj(y.transpose(1, 2).flatten(2)))  # B T C


class FastSwiGLU(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        y = decode.mlp(self, x)
        return super().forward(x) if y is None else y


class FastLlama(Llama):
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        weight = decode.plain_weight(self.lm_head)
        if (
            weight is None
            or decode.any_global_hook()
            or not supported(weight)
            or not targets_supported(targets, tokens, weight)
        ):
            return super().loss(tokens, targets)
        return linear_cross_entropy(self.hidden(tokens).flatten(0, 1), weight, targets.flatten())

    def next_logits(self, tokens: Tensor, cache: list[LayerCache]) -> Tensor:
        x = self.hidden(tokens, cache)[:, -1]  # B C
        y = decode.linear(x, self, "lm_head")
        return self.lm_head(x) if y is None else y  # B V
