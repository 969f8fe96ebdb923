"""How much the ranks of a training step send each other, from the shapes of the weights."""

import torch

from config import ModelConfig
from model import Llama
from optim import hidden_matrices

BYTES = 4  # of a weight or gradient: ranks exchange fp32


def collectives(
    config: ModelConfig, ranks: int, shard: bool, micro_batches: int = 1, optimizer: str = "adamw"
) -> dict[str, int]:
    """Bytes per optimizer step in each kind of collective, each counted by its whole, unsharded tensors.

    DDP sums every gradient once, after the last micro-batch: all_reduce = P.
    FSDP2 gathers every weight for the forward pass of each micro-batch, and those of the blocks again for its backward
    pass; embedding, head and final norm stay gathered in between. After the last micro-batch it sums the gradients
    and leaves each rank its part. P is padded here: each weight's rows to a multiple of the ranks.
    Muon gathers the momentum of the matrices in the blocks, padded likewise.

    Left out: a few scalars for loss, gradient norm and stop requests.
    """
    with torch.device("meta"):
        model = Llama(config)
    if not shard:
        return {"all_reduce": BYTES * sum(weight.numel() for weight in model.parameters())}

    def padded(weights) -> int:
        return BYTES * sum(-(-len(weight) // ranks) * ranks * weight[0].numel() for weight in weights)

    everything, blocks = padded(model.parameters()), padded(model.layers.parameters())
    gathered = micro_batches * (everything + blocks)
    if optimizer == "muon":
        gathered += padded(hidden_matrices(model))
    return {"all_gather": gathered, "reduce_scatter": everything}


def sent_per_rank(volume: dict[str, int], ranks: int) -> float:
    """Bytes that each rank sends in rings: (N − 1) / N of a tensor to gather or to scatter it, twice that for both."""
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    return sum(rounds[kind] * size for kind, size in volume.items()) * (ranks - 1) / ranks
