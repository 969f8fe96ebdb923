"""Norms in networks other than LLaMA: for images, (B, C, H, W), in the recurrence of an RNN, in an MLP."""

import torch
from torch import Tensor, nn

from norms.layernorm import LayerNorm
from norms.registry import build_norm


class ChannelsFirstLayerNorm(LayerNorm):
    """LayerNorm over the C channels of each pixel, (B, C, ...) → (B, C, ...), as in ConvNeXt, arXiv 2201.03545.

    What is sometimes called LayerNorm for convolutional networks, over the pixels of each channel, is
    `torch.nn.InstanceNorm2d`.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class LayerNormRNN(nn.Module):
    """hₜ = tanh(LayerNorm(W_hidden·hₜ₋₁ + W_input·xₜ)), Layer Normalization, arXiv 1607.06450, section 3.1.

    The norm is applied to the summed inputs of each step, inside the recurrence, so the hidden state neither explodes
    nor vanishes with the scale of the weights. Applying LayerNorm to the outputs of an ordinary RNN does not do that.
    """

    def __init__(self, inputs: int, hidden: int, eps: float = 1e-5):
        super().__init__()
        self.input = nn.Linear(inputs, hidden, bias=False)
        self.hidden = nn.Linear(hidden, hidden, bias=False)
        self.norm = LayerNorm(hidden, eps)

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """The hidden states (B, T, hidden) for x (B, T, inputs), starting from h (B, hidden) or zeros."""
        if h is None:
            h = x.new_zeros(len(x), self.hidden.in_features)
        states = []
        for x_t in x.unbind(1):
            h = torch.tanh(self.norm(self.hidden(h) + self.input(x_t)))
            states.append(h)
        return torch.stack(states, 1)


class NormMLP(nn.Sequential):
    """Linear → norm → ReLU → Linear, (N, inputs) → (N, classes) logits. `norm` is a registered kind.

    With LayerNorm before the activation, each unit stays active on part of the inputs at any weight scale.
    """

    def __init__(self, inputs: int = 4, hidden: int = 8, classes: int = 3, norm: str = "layernorm"):
        super().__init__(nn.Linear(inputs, hidden), build_norm(norm, hidden), nn.ReLU(), nn.Linear(hidden, classes))
