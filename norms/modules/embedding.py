"""Embeddings, plain and scaled. `model.draw_weights` initializes their weight."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def make_embedding(vocab_size: int, dim: int, constant: float, learned: bool) -> "Embedding | ScaledEmbedding":
    """An embedding times `constant`, and times a learned scalar if `learned`."""
    if learned or constant != 1:
        return ScaledEmbedding(vocab_size, dim, constant, learned)
    return Embedding(vocab_size, dim)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        pass


class ScaledEmbedding(nn.Module):
    """An embedding times a constant, as in Gemma, or times a learned scalar, √dim at the start (arXiv 2503.10622).

    It is no `nn.Embedding`, so that tools that merge an adapter into the weight, which would be scaled, refuse it.
    """

    def __init__(self, vocab_size: int, dim: int, constant: float, learned: bool):
        super().__init__()
        self.weight, self.constant = nn.Parameter(torch.empty(vocab_size, dim)), constant
        self.scale = nn.Parameter(torch.full((1,), math.sqrt(dim))) if learned else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weight)
        x = x if self.constant == 1 else x * self.constant
        return x if self.scale is None else self.scale * x
