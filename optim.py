"""Optimizers: which optimizer updates which parameter, and the learning rate schedule."""

import math
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from config import WSD_DECAY, TrainConfig
from machine import distributed
from model import Llama
from norms import KINDS
from roles import matrices

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients: singular values above 0.002 end between 0.7 and 1.2
NEWTON_SCHULZ_STEPS = 5
BATCH, ELEMENTS = 8, 1 << 26  # Muon multiplies so many matrices at once, or so many elements if that is more
ADAMW_LR_RATIO = 2.0  # learning rate of AdamW for embedding, head and norms, relative to Muon's


def make_optimizers(model: Llama, config: TrainConfig) -> list[Optimizer]:
    """AdamW for everything, or Muon for the matrices in the blocks and AdamW for the rest.

    The matrices in the blocks have weight decay, and so have the norm gains that --decay-gains names. Biases, embedding
    and head are not decayed. A group's "lr_ratio" is its learning rate relative to the schedule's.
    """
    hidden = dict.fromkeys(hidden_matrices(model))
    gains = set(decayed_gains(model, config.decay_gains))
    muon = config.optimizer == "muon"
    decay = {"params": [*hidden], "weight_decay": config.weight_decay, "lr_ratio": 1.0, "lr": config.lr}
    others = defaultdict(list)  # by weight decay and lr_ratio
    for weight in (weight for weight in model.parameters() if weight not in hidden):
        ratio = (ADAMW_LR_RATIO if muon else 1.0) * (config.vector_lr if weight.ndim < 2 else 1.0)
        others[config.weight_decay if weight in gains else 0.0, ratio].append(weight)
    rest = [
        {"params": weights, "weight_decay": wd, "lr_ratio": ratio, "lr": config.lr * ratio}
        for (wd, ratio), weights in others.items()
    ]
    adamw = AdamW(rest if muon else [*rest, decay], config.lr, betas=(0.9, 0.95), fused=True)
    if not muon:
        return [adamw]
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    return [Muon([decay], config.lr, config.momentum, dtype), adamw]


def hidden_matrices(model: Llama) -> list[Tensor]:
    """The matrices in the blocks: all except embedding and head."""
    return [weight for role, _, weight in matrices(model) if role.hidden]


def decayed_gains(model: Llama, which: str) -> list[Tensor]:
    """The gains that --decay-gains names: `weight` of norms.

    "output" are those norms whose result is, or is added to, the residual stream. "input" are the others around a
    sublayer, and that before the head. Only "all" has those on queries, keys, values, the embedding, and in sublayers.
    """
    parts: dict[str, list[Any]] = {"none": [], "input": [model.final_norm], "output": [], "all": [model]}
    blocks: Any = model.layers
    for block in blocks:
        for residual in (block.attention_residual, block.mlp_residual):
            for name, norm in residual.named_children():
                after = name in getattr(residual, "output_norms", ())
                parts["output" if after else "input"].append(norm)
    modules = [module for part in parts[which] for module in part.modules()]
    norms = [module for module in modules if isinstance(module, tuple(KINDS.values()))]
    weights = [getattr(norm, "weight", None) for norm in norms]
    return [weight for weight in weights if weight is not None]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of `step`, counted from 0: linear warmup, then the schedule, from `lr` down to `min_lr`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    fall = config.lr - config.min_lr
    if config.schedule == "cosine":
        return config.min_lr + fall * (1 + math.cos(math.pi * progress)) / 2
    if config.schedule == "linear":
        return config.min_lr + fall * (1 - progress)
    if config.schedule == "wsd":
        return config.min_lr + fall * min(1.0, (config.steps - step) / (WSD_DECAY * config.steps))
    return config.lr


class Muon(Optimizer):
    """Orthogonalized momentum: every singular value of a matrix's update is about 1. Jordan et al., 2024.

    Updates have the RMS of AdamW's (arXiv 2502.16982), so learning rates of the two are comparable. The same as
    `torch.optim.Muon` with `match_rms_adamw`, but matrices of one shape are multiplied at once.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float, dtype: torch.dtype = torch.float32):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.orthogonalize = partial(orthogonalize, dtype=dtype)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
            by_shape = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape].append(weight)
            for shape, weights in by_shape.items():
                scale = lr * 0.2 * math.sqrt(max(shape))
                size = max(BATCH, ELEMENTS // shape.numel())
                for start in range(0, len(weights), size):
                    batch = weights[start : start + size]
                    # Documented functions, despite the underscore: one launch for all tensors of a list.
                    updates = torch.stack(self.nesterov(batch, momentum))
                    # A part of a matrix cannot be orthogonalized.
                    updates = distributed.on_whole_matrices(self.orthogonalize, updates)
                    torch._foreach_mul_(batch, 1 - lr * decay)
                    torch._foreach_add_(batch, updates.unbind(), alpha=-scale)

    def nesterov(self, weights: list[Tensor], momentum: float) -> list[Tensor]:
        """Update the running means of the gradients, and return the Nesterov updates, which replace the gradients."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        gradients: Any = [weight.grad for weight in weights]
        means = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        torch._foreach_lerp_(gradients, means, momentum)  # in place, as torch 2.11 needs it for sharded weights
        return gradients


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximately U Vᵀ for each matrix U S Vᵀ of a batch, N rows columns, by a Newton-Schulz iteration in `dtype`."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT.contiguous() if tall else matrices).to(dtype)  # N short long
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value above 1
    for _ in range(NEWTON_SCHULZ_STEPS):  # each singular value s becomes a s + b s³ + c s⁵
        xx = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(xx, xx, xx, beta=b, alpha=c), x, beta=a)
    # Contiguous as the weights are: functions for lists launch one kernel only if strides agree.
    return torch.empty_like(matrices).copy_(x.mT if tall else x)
