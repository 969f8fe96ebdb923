"""The model: a decoder-only transformer after LLaMA (arXiv 2302.13971) whose norm and its placement are settings.

Shapes in comments: B sequences, T tokens, C features of the stream (dim), H query heads, K heads of
keys and values, D features of a head, V token ids.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ModelConfig
from gradients import CausalAttention, LinearCrossEntropy, Rotate, gated_silu, recomputed
from norms import TRAITS, build_norm
from norms.placement import PLACEMENTS, Site

RopeTable = tuple[Tensor, Tensor]  # cosines and sines of the positions at hand, T D/2 each


class Llama(nn.Module):
    """Token ids in, logits out.

    The initial weights depend on `config` and `seed` alone. Built under `torch.device("meta")`
    the model has shapes only, ready for `load_state_dict(..., assign=True)`.
    """

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.placement = PLACEMENTS[config.placement]
        self.embed_tokens = Embedding(config.vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.rope = Rope(config.head_dim, config.context, config.rope_theta)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.finish = self.placement.finish(_norm_maker(config))
        self.lm_head = Linear(config.dim, config.vocab_size)
        self.recompute = False  # each block's inside for the gradient, instead of keeping it
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        draw_weights(self, seed)

    def forward(self, tokens: Tensor, cache: "KVCache | None" = None) -> Tensor:
        """Logits (B, T, V) of what follows each of `tokens` (B, T).

        With a `cache` from `new_cache` the tokens go on where those of earlier calls ended.
        Raises ValueError where that is longer than the context.
        """
        return self.lm_head(self.hidden(tokens, cache))  # B T V

    def next_logits(self, tokens: Tensor, cache: "KVCache") -> Tensor:
        """Logits (B, V) of what follows the last of `tokens` (B, T): the head's work for one position, not for T."""
        return self.lm_head(self.hidden(tokens, cache)[:, -1])  # B V

    def hidden(self, tokens: Tensor, cache: "KVCache | None" = None) -> Tensor:
        """What the head reads, (B, T, C); see `forward`."""
        rope = self.rope(cache.length if cache else 0, tokens.shape[1])
        x = self.placement.start(self.dropout(self.embed_tokens(tokens)))  # B T C
        for layer, block in enumerate(self.layers):
            if self.recompute and torch.is_grad_enabled():
                x = recomputed(block, x, rope)
            else:
                x = block(x, rope, cache.blocks[layer] if cache else None)
        return self.finish(x)  # B T C

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per token, of predicting `targets` (B, T) from `tokens` (B, T)."""
        x = self.hidden(tokens).flatten(0, 1)
        return LinearCrossEntropy.apply(x, self.lm_head.weight, targets.flatten(), torch.is_grad_enabled())

    def new_cache(self) -> "KVCache":
        """An empty cache to pass to `forward` or `next_logits` again and again."""
        return KVCache(self.config.layers, self.config.context)


class Block(nn.Module):
    """Attention, then MLP, each handed to the residual connection of the chosen placement."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        residual = PLACEMENTS[config.placement].residual
        make_norm = _norm_maker(config)
        self.attention_residual = residual(Site("attention", layer, config.layers, make_norm))
        self.self_attn = Attention(config)
        self.mlp_residual = residual(Site("mlp", layer, config.layers, make_norm))
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rope: RopeTable, cache: "BlockCache | None" = None) -> Tensor:
        x = self.attention_residual(x, self.self_attn, rope, cache)
        return self.mlp_residual(x, self.mlp)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; H/K query heads share keys and values (GQA, arXiv 2305.13245)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = nn.Dropout(config.dropout)
        self.q_proj = Linear(config.dim, config.heads * config.head_dim)
        self.k_proj = Linear(config.dim, config.kv_heads * config.head_dim)
        self.v_proj = Linear(config.dim, config.kv_heads * config.head_dim)
        self.qkv = Together(self.q_proj, self.k_proj, self.v_proj)
        self.widths = [part.out_features for part in self.qkv.parts]
        self.o_proj = Linear(config.heads * config.head_dim, config.dim)
        self.q_norm = head_norm(config, config.heads, "query")
        self.k_norm = head_norm(config, config.kv_heads, "key")
        self.v_norm = head_norm(config, config.kv_heads, "value")

    def forward(self, x: Tensor, rope: RopeTable, cache: "BlockCache | None" = None) -> Tensor:
        q, k, v = self.heads(x)
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # B H T D, B K T D twice
        if cache is not None:
            k, v = cache.extend(k, v)  # B K S D
        y = attend(q, k, v, self.dropout.p if self.training else 0.0)  # B H T D
        return self.dropout(self.o_proj(y.transpose(1, 2).flatten(2)))  # B T C

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, B T H D, keys and values, B T K D, with their norms."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x).split(self.widths, -1))
        return self.q_norm(q), self.k_norm(k), self.v_norm(v)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)). GLU Variants Improve Transformer, arXiv 2002.05202."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.gate_proj = Linear(config.dim, config.hidden_dim)
        self.up_proj = Linear(config.dim, config.hidden_dim)
        self.gate_up = Together(self.gate_proj, self.up_proj)
        self.down_proj = Linear(config.hidden_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down_proj(gated_silu(self.gate_up(x))))


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Attention of the last T of S positions, q B H T D, to those before them and themselves, k and v B K S D."""
    new, seen, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if slow_backward(q) and new == seen and not dropout:
        return CausalAttention.apply(q, *(x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v)))
    mask = None
    if 1 < new < seen:
        mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=1 < new == seen, enable_gqa=group > 1)


def slow_backward(q: Tensor) -> bool:
    """Whether PyTorch's own attention would take long over the gradient: in half precision on a CPU."""
    return torch.is_grad_enabled() and q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)


# --- rotary positions ------------------------------------------------------------------------------------------------


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> RopeTable:
    """Cosines and sines, each (end, dim/2) in fp32, of position · theta^(-2i/dim). RoFormer, arXiv 2104.09864.

    The angles are formed in float64: in fp32 they are off by 0.004 at position 100,000.
    """
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    angles = torch.outer(torch.arange(end, dtype=torch.float64, device="cpu"), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, rope: RopeTable) -> Tensor:
    """Turn each pair of features (i, i + D/2) of `x`, B T H D, by its position's angle, in fp32 or more.

    Pairing halves instead of neighbours is the layout of Hugging Face's Llama weights.
    """
    return Rotate.apply(x, *rope)


class Rope(nn.Module):
    """The table of rotary positions: a function of the configuration, so no checkpoint holds it."""

    def __init__(self, head_dim: int, context: int, theta: float):
        super().__init__()
        self.make_table = partial(precompute_freqs_cis, head_dim, context, theta)
        self.context = context
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = self.make_table()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, start: int, length: int) -> RopeTable:
        if start + length > self.context:
            raise ValueError(f"{start + length} tokens are more than the model's context of {self.context}")
        return self.cos[start : start + length], self.sin[start : start + length]

    def _apply(self, fn: Callable, recurse: bool = True) -> "Rope":
        """Follow the model to its device only: `.bfloat16()` would round the table and `to_empty` would blank it."""
        super()._apply(fn, recurse)
        self.cos, self.sin = (table.to(self.cos.device) for table in self.make_table())
        return self


# --- norms on queries, keys and values, and the cache ----------------------------------------------------------------


def head_norm(config: ModelConfig, heads: int, site: str) -> nn.Module:
    """The norm on the queries, keys or values, B T heads D: of each head (arXiv 2010.04245), of all at once, or none.

    `--qk-norm` decides for queries and keys; where it does not, and for values, the placement does, and always per
    head. The norm is of the model's kind, or RMSNorm where that kind makes no sense on a single head.
    """
    extent = "none" if site == "value" else config.qk_norm
    if extent == "none" and PLACEMENTS[config.placement].qkv_norm:
        extent = "head"
    if extent == "none":
        return nn.Identity()
    width = config.head_dim if extent == "head" else heads * config.head_dim
    kind, norm_args = (config.norm, config.norm_args) if TRAITS[config.norm].per_head else ("rmsnorm", {})
    norm = build_norm(kind, width, site=site, **norm_args)
    return norm if extent == "head" else FullWidth(norm)


class FullWidth(nn.Module):
    """A norm over the features of all heads together, B T H D."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(-2)).view_as(x)


class KVCache:
    """The keys and values of every block for the `length` tokens so far."""

    def __init__(self, layers: int, context: int):
        self.blocks = [BlockCache(context) for _ in range(layers)]

    @property
    def length(self) -> int:
        return self.blocks[0].length


class BlockCache:
    """The keys and values of one block for the `length` tokens so far; the memory for `context` is taken at once."""

    def __init__(self, context: int):
        self.context, self.length = context, 0
        self.keys, self.values = torch.empty(0), torch.empty(0)  # B K context D

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of new tokens, B K T D; all so far, B K S D."""
        if self.length == 0:
            batch, heads, _, head_dim = k.shape
            self.keys, self.values = k.new_empty(2, batch, heads, self.context, head_dim)
        new = slice(self.length, self.length + k.shape[2])
        self.keys[:, :, new], self.values[:, :, new] = k, v
        self.length = new.stop
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


# --- initial weights -------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """x Wᵀ. Its weight is left to `draw_weights`."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class Together:
    """Several matrices' products with the same x, side by side.

    The matrices stay with their modules, which are not called where one product is quicker: hooks belong elsewhere.
    """

    def __init__(self, *parts: Linear):
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() < self.parts[0].weight.numel():  # then it takes longer to join the matrices than the outputs
            return torch.cat([part(x) for part in self.parts], -1)
        return F.linear(x, torch.cat([part.weight for part in self.parts]))


class Embedding(nn.Embedding):
    """A row of features for each token id, left to `draw_weights`."""

    def reset_parameters(self) -> None:
        pass


# What a block's matrices do, and where they are.
ROLES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def weights_by_role(model: Llama) -> Iterator[tuple[str, str, Tensor]]:
    """Role, Hugging Face name and weight of every matrix of `model`."""
    yield "embedding", "model.embed_tokens.weight", model.embed_tokens.weight
    for layer, block in enumerate(model.layers):
        for role, path in ROLES.items():
            yield role, f"model.layers.{layer}.{path}.weight", block.get_parameter(f"{path}.weight")
    if not model.config.tie_embeddings:
        yield "head", "lm_head.weight", model.lm_head.weight


@torch.no_grad()
def draw_weights(model: Llama, seed: int) -> None:
    """Fill every matrix from N(0, std²), std by its role; norms start as their kind says.

    The unscaled draw is a function of the seed, the matrix's Hugging Face name and its shape, made on the
    CPU, so that models which differ in their norm start alike on every device.
    """
    for role, name, weight in weights_by_role(model):
        if not weight.is_meta:
            source = hashlib.sha256(f"{seed} {name} {tuple(weight.shape)}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(source[:7]))
            draw = torch.randn(weight.shape, generator=generator, device="cpu")
            weight.copy_(draw * initial_std(model.config, role, weight.shape))


def initial_std(config: ModelConfig, role: str, shape: torch.Size) -> float:
    """Standard deviation of a weight of `shape` at the start.

    `normal` is 0.02, over sqrt(2 layers) for what writes into the stream (GPT-2); `xavier` is
    sqrt(2 / (inputs + outputs)), but 0.02 for the embedding, whose rows are looked up, not summed over.
    """
    placement = PLACEMENTS[config.placement]
    gain = placement.init_gain(role, config.layers)
    if config.init == "xavier" and role != "embedding":
        return gain * math.sqrt(2 / sum(shape))
    if config.depth_scaled_init and placement.depth_scaled and role in ("attention_out", "down"):
        gain /= math.sqrt(2 * config.layers)
    return gain * 0.02


def _norm_maker(config: ModelConfig) -> Callable[[str], nn.Module]:
    return lambda site: build_norm(config.norm, config.dim, site=site, **config.norm_args)
