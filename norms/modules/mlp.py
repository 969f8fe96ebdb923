"""An MLP with a norm, in the usual order: linear, norm, activation."""

from torch import nn

from norms.registry import build_norm


class NormMLP(nn.Sequential):
    """Linear → norm → ReLU → Linear, (N, inputs) → (N, classes) logits. `norm` is a registered kind.

    With LayerNorm before the activation, units stay active on part of the inputs at any weight scale.
    """

    def __init__(self, inputs: int = 4, hidden: int = 8, classes: int = 3, norm: str = "layernorm"):
        super().__init__(nn.Linear(inputs, hidden), build_norm(norm, hidden), nn.ReLU(), nn.Linear(hidden, classes))
