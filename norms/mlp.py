"""Linear → norm → activation, the usual order, in a network small enough to follow by hand."""

import torch
from torch import Tensor, nn

from norms.registry import build_norm


class NormMLP(nn.Sequential):
    """Linear → norm → ReLU → Linear, (N, inputs) → (N, classes) logits, with the norm of the given kind.

    Normalised before the activation, each unit is on for some inputs and off for others, whatever the weights' scale.
    """

    def __init__(self, inputs: int = 4, hidden: int = 8, classes: int = 3, norm: str = "layernorm"):
        super().__init__(nn.Linear(inputs, hidden), build_norm(norm, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def flowers(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A made-up problem of the size of Iris: (150, 4) measurements of 50 flowers of each of three kinds, and the kinds.

    One kind lies apart and the other two overlap a little, as Iris's do.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[5.0, 3.4, 1.5, 0.3], [5.9, 2.8, 4.2, 1.3], [6.6, 3.0, 5.6, 2.0]])
    kinds = torch.arange(3).repeat_interleave(50)
    return centres[kinds] + 0.35 * torch.randn(150, 4, generator=generator), kinds
