"""What happens inside the blocks: the residual stream, gradients and gains over depth."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from model import Llama
from norms import KINDS


@dataclass(frozen=True)
class BlockStatistics:
    """Statistics of one block. Block 0 is the embedding: it has no gains, and may be tied to the output head."""

    block: int
    residual_rms: float  # of the residual stream after the block
    second_rms: float | None  # of the second stream, if the placement has one
    grad_norm: float  # of the loss, over the block's weights
    gain_mean: float | None  # of the absolute gains of all norms in the block
    gain_min: float | None
    gain_max: float | None


def probe(model: Llama, tokens: Tensor, targets: Tensor) -> list[BlockStatistics]:
    """Statistics of the embedding and of every block on one batch, (B, T) each, in training mode and fp32.

    Leaves that batch's gradients in the model. Norms with running statistics update them once.
    """
    streams: list[Tensor | tuple[Tensor, Tensor]] = []
    hooks = [model.layers[0].register_forward_pre_hook(lambda block, args: streams.append(args[0]))]
    hooks += [layer.register_forward_hook(lambda block, args, out: streams.append(out)) for layer in model.layers]
    model.train().zero_grad()
    model.loss(tokens, targets).backward()
    for hook in hooks:
        hook.remove()
    parts = [model.embed_tokens, *model.layers]
    return [_statistics(block, stream, part) for block, (stream, part) in enumerate(zip(streams, parts, strict=True))]


def _statistics(block: int, stream: Tensor | tuple[Tensor, Tensor], part: nn.Module) -> BlockStatistics:
    rms = [float(x.detach().square().mean().sqrt()) for x in (stream if isinstance(stream, tuple) else (stream,))]
    norms = [module for module in part.modules() if isinstance(module, tuple(KINDS.values()))]
    gains = [gain.detach().abs() for norm in norms for name, gain in norm.named_parameters() if name == "weight"]
    gain = torch.cat(gains) if gains else None
    summary = (None, None, None) if gain is None else (float(gain.mean()), float(gain.min()), float(gain.max()))
    grad_norm = float(get_total_norm([weight.grad for weight in part.parameters() if weight.grad is not None]))
    return BlockStatistics(block, rms[0], rms[1] if len(rms) > 1 else None, grad_norm, *summary)
