"""Norms in networks other than LLaMA: for images, (B, C, H, W), in the recurrence of an RNN, in an MLP."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from norms.layernorm import LayerNorm
from norms.numerics import check_arguments, upcast
from norms.registry import build_norm


class ChannelsFirstLayerNorm(LayerNorm):
    """LayerNorm over the C channels of each pixel, (B, C, ...) → (B, C, ...), as in ConvNeXt, arXiv 2201.03545."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class InstanceNorm(nn.Module):
    """(x − μ) / sqrt(σ² + eps) · weight + bias, with μ and biased σ² over the pixels of each channel of each image.

    (B, C, ...) → (B, C, ...), one weight and bias per channel. Instance Normalization, arXiv 1607.08022. It is
    sometimes called LayerNorm for convolutional networks, but unlike LayerNorm it has statistics per channel.
    """

    def __init__(self, channels: int, eps: float = 1e-5):
        super().__init__()
        check_arguments(channels, eps=eps)
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        h = upcast(x.movedim(1, -1), len(self.weight)).movedim(-1, 1)
        y = F.layer_norm(h, h.shape[2:], eps=self.eps)
        return (y.movedim(1, -1) * self.weight + self.bias).movedim(-1, 1).to(x.dtype)


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

    With LayerNorm before the activation, units stay active on part of the inputs at any weight scale.
    """

    def __init__(self, inputs: int = 4, hidden: int = 8, classes: int = 3, norm: str = "layernorm"):
        super().__init__(nn.Linear(inputs, hidden), build_norm(norm, hidden), nn.ReLU(), nn.Linear(hidden, classes))
