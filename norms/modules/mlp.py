"""Linear → norm → activation, in the usual order."""

from torch import nn

from norms.registry import build_norm


class NormMLP(nn.Sequential):
    """Linear → norm → ReLU → Linear, (N, inputs) → (N, classes) logits, with the norm of the given kind.

    Normalized before the activation, each unit is active for some inputs and not for others at any weight scale.
    """

    def __init__(self, inputs: int = 4, hidden: int = 8, classes: int = 3, norm: str = "layernorm"):
        super().__init__(nn.Linear(inputs, hidden), build_norm(norm, hidden), nn.ReLU(), nn.Linear(hidden, classes))
