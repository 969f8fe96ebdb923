"""RMSNorm without weights: the gains are folded into the matrices that follow. FlashNorm, arXiv 2407.09577."""

import dataclasses

import torch

from config import ModelConfig
from model import Llama

FOLDABLE = ("pre", "lns", "rezero")  # the placements where matrices, and nothing else, read a norm's output
READERS = {  # in a block: a norm, and the matrices that read its output
    "attention_residual.norm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp_residual.norm": ("mlp.gate_proj", "mlp.up_proj"),
}


def fold_gains(model: Llama) -> Llama:
    """A new model that computes the same, up to rounding, with RMSNorms that have no gains: W (g ⊙ x) = (W diag g) x.

    It is an ordinary model whose norm has the argument elementwise_affine=False. Raises ValueError if there is a gain
    that no matrix can take.
    """
    check_foldable(model.config)
    readers = {"finish": ["lm_head"]}
    for layer in range(model.config.layers):
        at = f"layers.{layer}."
        readers |= {at + norm: [at + matrix for matrix in matrices] for norm, matrices in READERS.items()}
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for norm, matrices in readers.items():
        if f"{norm}.weight" in state:  # ReZero has only the final norm
            gain = state.pop(f"{norm}.weight") + model.config.norm_args.get("zero_centered", False)
            for matrix in matrices:
                state[f"{matrix}.weight"] *= gain
    without_gains = model.config.norm_args | {"elementwise_affine": False}
    with torch.device("meta"):
        folded = Llama(dataclasses.replace(model.config, norm_args=without_gains))
    folded.load_state_dict(state, assign=True)
    return folded.to(model.embed_tokens.weight.device).train(model.training)


def check_foldable(config: ModelConfig) -> None:
    """Raise ValueError unless every gain of such a model can be folded."""
    if config.norm != "rmsnorm" or not config.norm_args.get("elementwise_affine", True):
        raise ValueError("only the gains of --norm rmsnorm can be folded, and this model has none")
    if config.placement not in FOLDABLE:
        raise ValueError(
            f"gains can be folded with --placement {', '.join(FOLDABLE)}; with {config.placement}, the output of a "
            "norm is a part of the stream"
        )
    if config.qk_norm != "none":
        raise ValueError("the gains of --qk-norm cannot be folded: no matrix reads the normalized queries and keys")
    if config.tie_embeddings:
        raise ValueError("the final gain cannot be folded into a tied head, which is the embedding as well")
