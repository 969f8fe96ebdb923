"""Optimizers and their learning rate: which parameter is updated by what, and how fast at which step."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from config import TrainConfig
from machine import has_bfloat16
from model import Llama, weights_by_role

NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5  # Jordan's coefficients: singular values end between 0.7 and 1.2
BESIDE_MUON = 2.0  # AdamW's rate for embedding, head and norms, in Muon's
FINAL_SHARE = 0.0  # of the peak learning rate, at the end of all schedules but `constant`
WSD_DECAY = 0.2  # share of all steps in which `wsd` goes down


def make_optimizers(model: Llama, config: TrainConfig) -> list[Optimizer]:
    """AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest.

    Only the blocks' matrices decay: not the gains and biases of norms, nor embedding and head. The "share" of a group
    is its rate in that of the schedule.
    """
    hidden = hidden_matrices(model)
    chosen = {id(weight) for weight in hidden}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    no_decay = {"params": others, "weight_decay": 0.0, "share": 1.0}
    decay = {"params": hidden, "weight_decay": config.weight_decay, "share": 1.0}
    if config.optimizer == "muon":
        no_decay["share"] = BESIDE_MUON
        return [Muon([decay], config.lr, config.momentum), AdamW([no_decay], config.lr)]
    return [AdamW([no_decay, decay], config.lr)]


def hidden_matrices(model: Llama) -> list[Tensor]:
    """The matrices inside the blocks: all that is drawn, but for embedding and head."""
    return [weight for role, _, weight in weights_by_role(model) if role not in ("embedding", "head")]


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate for the update after `step` earlier ones: linear warm-up, then the schedule."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    if config.schedule == "cosine":
        share = (1 + math.cos(math.pi * done)) / 2
    elif config.schedule == "linear":
        share = 1 - done
    elif config.schedule == "wsd":
        share = min(1.0, (config.steps - step) / (WSD_DECAY * config.steps))
    else:
        return config.lr
    return config.lr * (FINAL_SHARE + (1 - FINAL_SHARE) * share)


# --- the optimizers --------------------------------------------------------------------------------------------------


class LeanOptimizer(Optimizer):
    """torch's base class without what imports torch's compiler, a second at the start of every run."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append(self.defaults | param_group)


class Muon(LeanOptimizer):
    """Momentum made orthogonal: every singular value of a matrix's update is about 1. Jordan et al. 2024.

    Updates are scaled to the root mean square of AdamW's (arXiv 2502.16982), so both take the same rate. As
    `torch.optim.Muon` with `match_rms_adamw`, but matrices of one shape go through their products together, and so
    do their transposes, in half to three quarters of the time on a CPU.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float):
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    alike.setdefault(tuple(sorted(weight.shape)), []).append(weight)
            for (_, longer), weights in alike.items():
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                updates = orthogonal([self._ahead(weight, group["momentum"]) for weight in weights])
                torch._foreach_add_(weights, updates, alpha=-group["lr"] * 0.2 * math.sqrt(longer))

    def _ahead(self, weight: Tensor, momentum: float) -> Tensor:
        """The running mean of the gradient, and a step ahead of it (Nesterov)."""
        gradient, state = weight.grad, self.state[weight]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(mean, momentum)


def orthogonal(matrices: list[Tensor]) -> list[Tensor]:
    """U Vᵀ of each U S Vᵀ, nearly: five steps of a Newton-Schulz iteration leave singular values from 0.7 to 1.2.

    The matrices are of one shape or its transpose. In bfloat16 where the device computes in it.
    """
    wide = [matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT for matrix in matrices]
    dtype = torch.bfloat16 if has_bfloat16(wide[0].device) else torch.float32
    x = torch.stack([matrix.to(dtype) for matrix in wide])  # matrices, shorter side, longer side
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value above 1
    for a, b, c in NEWTON_SCHULZ:  # s ← a s + b s³ + c s⁵ for each singular value s
        xx = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(xx, xx, xx, beta=b, alpha=c), x, beta=a)
    x = x.to(matrices[0].dtype)
    return [
        result if matrix.shape[0] <= matrix.shape[1] else result.mT for matrix, result in zip(matrices, x, strict=True)
    ]


class AdamW(LeanOptimizer):
    """Decoupled Weight Decay Regularization, arXiv 1711.05101: `torch.optim.AdamW(..., fused=True)`."""

    def __init__(self, groups: list[dict[str, Any]], lr: float):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            states = [self.state[weight] or self._start(weight) for weight in weights]
            adamw(
                weights,
                grads=[weight.grad for weight in weights],
                exp_avgs=[state["exp_avg"] for state in states],
                exp_avg_sqs=[state["exp_avg_sq"] for state in states],
                max_exp_avg_sqs=[],
                state_steps=[state["step"] for state in states],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
                fused=True,
            )

    def _start(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[weight]
        state["step"] = torch.zeros((), device=weight.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return state
