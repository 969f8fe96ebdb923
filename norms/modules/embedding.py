"""Embeddings that are scaled, by a constant or by a learned scalar. `model.draw_weights` initializes their weight."""

import math

import torch
from torch import Tensor, nn


class Embedding(nn.Embedding):
    """An embedding times a constant, 1 or, as in Gemma, √dim."""

    def __init__(self, vocab_size: int, dim: int, constant: float = 1.0):
        super().__init__(vocab_size, dim)
        self.constant = constant

    def reset_parameters(self) -> None:
        pass

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return x if self.constant == 1 else x * self.constant


class ScaledEmbedding(Embedding):
    """An embedding times a learned scalar, √dim at the start. Transformers without Normalization, arXiv 2503.10622."""

    def __init__(self, vocab_size: int, dim: int, constant: float = 1.0):
        super().__init__(vocab_size, dim, constant)
        self.scale = nn.Parameter(torch.full((1,), math.sqrt(dim)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * super().forward(tokens)
