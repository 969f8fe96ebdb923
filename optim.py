"""Optimizers and their learning rate: which parameter is updated by what, and how fast at which step."""

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from config import TrainConfig
from model import Llama, weights_by_role

FINAL_SHARE = 0.0  # of the peak learning rate, at the end of `cosine` and `wsd`
WSD_DECAY = 0.2  # share of all steps in which `wsd` goes down


def make_optimizers(model: Llama, config: TrainConfig) -> list[Optimizer]:
    """AdamW for everything, or Muon (Jordan et al. 2024) for the blocks' matrices and AdamW for the rest.

    Only the blocks' matrices decay: not the gains and biases of norms, nor embedding and head.
    Muon's updates are scaled to the root mean square of AdamW's (arXiv 2502.16982), so both take the same rate.
    Raises ValueError if this torch has no Muon.
    """
    hidden = hidden_matrices(model)
    chosen = {id(weight) for weight in hidden}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    adamw_groups = [{"params": others, "weight_decay": 0.0}]
    optimizers: list[Optimizer] = []
    if config.optimizer == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"--optimizer muon: torch {torch.__version__} has none (2.9 and later do); try adamw")
        muon = torch.optim.Muon(hidden, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    else:
        adamw_groups.append({"params": hidden, "weight_decay": config.weight_decay})
    optimizers.append(torch.optim.AdamW(adamw_groups, lr=config.lr, betas=(0.9, 0.95), fused=True))
    return optimizers


def hidden_matrices(model: Llama) -> list[Tensor]:
    """The matrices inside the blocks: all that is drawn, but for embedding and head."""
    return [weight for role, _, weight in weights_by_role(model) if role not in ("embedding", "head")]


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate for the update after `step` earlier ones: linear warm-up, then the schedule."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "cosine":
        done = (step - config.warmup) / max(1, config.steps - config.warmup)
        share = (1 + math.cos(math.pi * done)) / 2
    elif config.schedule == "wsd":
        share = min(1.0, (config.steps - step) / (WSD_DECAY * config.steps))
    else:
        return config.lr
    return config.lr * (FINAL_SHARE + (1 - FINAL_SHARE) * share)
