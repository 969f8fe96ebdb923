"""`--watch`: what happens inside a model while it trains. docs/python.md has the columns of `watch.jsonl`."""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from machine.device import autocast
from model import Llama
from norms import KINDS
from norms.numerics import upcast
from norms.placement import PLACEMENTS
from runtime.run_dir import Row, append

Modules = dict[str, nn.Module]


class Watch:
    """Measures a step of `model`: `start` after its backward pass, `finish` at its end.

    The step keeps its bits. Needs memory for a second copy of the matrices.
    """

    def __init__(self, model: Llama, step: int, path: Path):
        self.model, self.step, self.path = model, step, path

    def start(self, tokens: Tensor, dtype: torch.dtype, loss_scale: float) -> None:
        """Measure the forward pass of `tokens` (B, T), and the gradients of the batch, without the `loss_scale`."""
        with autocast(tokens.device, dtype):
            self.rows = measure_sites(self.model, tokens)
        self.matrices = []
        for row, (_, _, site) in zip(self.rows, sites(self.model), strict=True):
            for name, module in site.items():
                for weight in (each for each in module.parameters(recurse=False) if each.ndim == 2):
                    self.matrices.append((row, name, weight, weight.detach().clone()))
                    if weight.grad is not None:
                        row[f"grad_rms.{name}"] = rms(weight.grad) / loss_scale

    def finish(self) -> None:
        """Add what has changed, and append the rows to the file."""
        for row, name, weight, before in self.matrices:
            change = weight.detach() - before
            row[f"update.{name}"] = (change.norm() / before.norm()).item()  # some weights start at zero
        for row in self.rows:
            for key, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):
                    row[key] = None
        append(self.path, "".join(json.dumps({"step": self.step} | row) + "\n" for row in self.rows))


def measure_sites(model: Llama, tokens: Tensor) -> list[Row]:
    """A row a site, about the forward pass of `tokens` (B, T). Running statistics stay as they are."""
    rows, hooks = [], []
    for block, name, site in sites(model):
        rows.append({"block": block, "site": name})
        hooks.extend(attach(rows[-1], site, PLACEMENTS[model.config.placement].streams))
    with torch.no_grad():
        functional_call(model, {name: buffer.clone() for name, buffer in model.named_buffers()}, (tokens,))
    for hook in hooks:
        hook.remove()
    return rows


def sites(model: Llama) -> Iterator[tuple[int, str, Modules]]:
    """Block, name and modules of each site, in the order of the forward pass. Blocks count from 1."""
    yield 0, "embedding", modules(embed_tokens=model.embed_tokens)
    for block, layer in enumerate(model.layers, 1):
        yield block, "attention", modules(residual=layer.attention_residual, self_attn=layer.self_attn)
        yield block, "mlp", modules(residual=layer.mlp_residual, mlp=layer.mlp)
    yield len(model.layers) + 1, "output", modules(final_norm=model.final_norm, lm_head=model.lm_head)


def modules(**parts: Any) -> Modules:
    """The parts of a site and all modules in them. A part's name is left out of the names of modules in it."""
    named = (pair for top, part in parts.items() for pair in part.named_modules(prefix=top))
    return {name.partition(".")[2] or name: module for name, module in named}


def attach(row: Row, site: Modules, streams: Callable[[Any], tuple[Tensor, ...]]) -> list[RemovableHandle]:
    """Hooks on the modules of a site that fill its row. `streams` says what to measure of the residual stream."""
    queries: list[Tensor] = []

    def record(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(module, tuple(KINDS.values())):
            row[f"input_rms.{name}"] = rms(args[0])
            for parameter, x in module.named_parameters(recurse=False):
                label = "gain" if parameter == "weight" else parameter
                row[f"{label}_mean.{name}"] = x.mean().item()
                row[f"{label}_std.{name}"] = x.std(correction=0).item()
        elif name == "residual":
            for column, stream in (("stream_before", args[0]), ("stream_after", output)):
                for prefix, part in zip(("", "second_"), streams(stream), strict=False):
                    row[prefix + column] = rms(part)
        if name == "rotated_q_norm":
            queries.append(output)
        elif name == "rotated_k_norm":
            row["max_logit"] = max_logit(queries.pop(), output)

    return [module.register_forward_hook(partial(record, name)) for name, module in site.items()]


def rms(x: Tensor) -> float:
    """The root of the mean square, in at least fp32."""
    return upcast(x).square().mean().sqrt().item()


def max_logit(q: Tensor, k: Tensor) -> float:
    """The largest q·k/√D of a token and one that it attends to. `q` is B T H D, `k` B T K D."""
    length, heads = q.shape[1:3]
    k = k.repeat_interleave(heads // k.shape[2], dim=2)  # B T H D
    future = torch.full((length, length), -math.inf, device=q.device).triu(1)
    with torch.autocast(q.device.type, enabled=False):
        sequences = zip(q.float(), k.float(), strict=True)  # one at a time, for memory
        largest = max((torch.einsum("qhd,khd->hqk", *each) + future).max().item() for each in sequences)
    return largest / math.sqrt(q.shape[-1])
