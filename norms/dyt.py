"""Dynamic Tanh: Transformers without Normalization, arXiv 2503.10622."""

import math

import torch
from torch import Tensor, nn

from norms.numerics import check_arguments, upcast
from norms.pointwise import TANH, apply
from norms.registry import register


@register("dyt", scale_invariant=False)
class DyT(nn.Module):
    """weight · tanh(α · x) + bias, feature by feature: no statistics, one learnt α in `alpha`, of shape (1,).

    α starts at `alpha`, before attention at `attention_ratio` times that. The paper finds 0.5 everywhere right for
    most models, but not for LLaMA, where larger ones start lower and attention higher: 0.2 and a ratio of 4 at 7B,
    0.05 and 4 at 70B. (Its LLaMA also multiplies the embedding by a learnt scalar, √dim at the start, which is the
    model's business and is not done here.) Computed in fp32, then cast back once.
    """

    def __init__(self, dim: int, site: str = "", *, alpha: float = 0.5, attention_ratio: float = 1.0):
        super().__init__()
        check_arguments(dim)
        if not 0 < alpha * attention_ratio < math.inf or alpha < 0:
            raise ValueError(f"alpha and attention_ratio of dyt must be positive, not {alpha} and {attention_ratio}")
        self.start = alpha * attention_ratio if site == "attention" else alpha
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight, self.bias = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.start)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return apply(self.formula, TANH, x, self.alpha, None, self.weight, self.bias)

    def formula(self, x: Tensor, alpha: Tensor, shift: None, weight: Tensor, bias: Tensor) -> Tensor:
        return (torch.tanh(alpha * upcast(x)) * weight + bias).to(x.dtype)
