"""The embedding of the models without statistics."""

import math

import torch
from torch import Tensor, nn


class ScaledEmbedding(nn.Embedding):
    """An embedding times a learned scalar, √dim at the start. Transformers without Normalization, arXiv 2503.10622.

    The weight is left uninitialized, for `model.draw_weights`.
    """

    def __init__(self, vocab_size: int, dim: int):
        super().__init__(vocab_size, dim)
        self.scale = nn.Parameter(torch.full((1,), math.sqrt(dim)))

    def reset_parameters(self) -> None:
        pass

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * super().forward(tokens)
