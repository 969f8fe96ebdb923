"""Dynamic Tanh: Transformers without Normalization, arXiv 2503.10622."""

import torch
from torch import Tensor, nn

from norms.numerics import upcast
from norms.registry import register


@register("dyt", scale_invariant=False)
class DyT(nn.Module):
    """weight · tanh(α · x) + bias, feature by feature: no statistics, one learned α in `alpha`, of shape (1,).

    α starts at `alpha`, multiplied by `attention_ratio` in attention's residual connection. The paper uses 0.5
    everywhere for most models. For LLaMA it uses a smaller alpha in larger models and a larger one before attention:
    0.2 with a ratio of 4 at 7B, 0.05 with 4 at 70B. The paper's LLaMA also multiplies the embedding by a learned
    scalar, √dim at the start: --scaled-embedding. Without it, small models may not train at all. Computed in fp32, then
    cast back once.
    """

    def __init__(self, dim: int, site: str = "", *, alpha: float = 0.5, attention_ratio: float = 1.0):
        super().__init__()
        if min(alpha, attention_ratio) <= 0:
            raise ValueError(f"alpha and attention_ratio of dyt must be positive, not {alpha} and {attention_ratio}")
        initial_alpha = alpha * attention_ratio if site == "attention" else alpha
        self.alpha = nn.Parameter(torch.full((1,), float(initial_alpha)))
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.alpha * upcast(x)) * self.weight + self.bias).to(x.dtype)
