"""A decoder-only transformer in the style of LLaMA (arXiv 2302.13971) with a configurable norm and placement.

Shapes in comments:
    B sequences   T new tokens   S tokens including cached ones   C features (dim)   V vocabulary size
    H query heads   K key/value heads   D features per head   R of them with rotary positions
A `cache` is a list with a `LayerCache` for each layer.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from config import ModelConfig
from files import require
from norms import build_norm
from norms.numerics import upcast
from norms.placement import PLACEMENTS, Site
from roles import EMBEDDING, Linear, draw_weights

RopeTable = tuple[Tensor, Tensor]  # cosines and sines, each T R/2
Stream = Tensor | tuple[Tensor, ...]  # what blocks pass on: B T C, or several as B T n C or a tuple
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}
LARGE_VOCABULARY = 1 << 16  # with more ids, the loss is computed for LOSS_TOKENS tokens at a time
LOSS_TOKENS = 1 << 12
IGNORED = -100  # a target without a loss, as of F.cross_entropy


class Llama(nn.Module):
    """Token ids in, logits out. `Llama(dim=64)` is short for `Llama(ModelConfig(dim=64))`.

    The initial weights depend only on `config` and `seed`. Under `torch.device("meta")` the parameters have no storage,
    ready for `load_state_dict(..., assign=True)`.

    Training and generation run it under `torch.autocast`: matrix products in --dtype; norms, the residual stream and,
    in training, weights in fp32.
    """

    def __init__(self, config: ModelConfig | None = None, seed: int = 0, **fields):
        super().__init__()
        require(config is None or not fields, "Llama takes a ModelConfig or its fields, not both")
        self.config = config = config or ModelConfig(**fields)
        # Gradient checkpointing (arXiv 1604.06174): keep each block's input, recompute the rest in backward. Not for
        # norms with running statistics, which would be updated twice.
        self.recompute = False
        placement = PLACEMENTS[config.placement]
        self.embed_tokens = Embedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.rope = Rope(config)
        self.init_stream = partial(placement.init_stream, **config.placement_args)  # B T C to the stream
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        make_norm = partial(build_norm, config.norm, config.dim, **config.norm_args)
        site = Site("final", config.layers, config.layers, config.dim, make_norm, Linear)
        self.final_norm = placement.final_norm(site, **config.placement_args)  # nn.Identity if there is none
        self.lm_head = placement.scale(Linear(config.dim, config.vocab_size, role="head"), config)
        self.tie_weights()
        self.register_load_state_dict_pre_hook(check_tie)
        self.register_load_state_dict_post_hook(Llama.tie_weights)
        draw_weights(self, seed)

    def forward(self, tokens: Tensor, cache: "list[LayerCache] | None" = None) -> Tensor:
        """Logits (B, T, V) for the token after each of `tokens` (B, T).

        With a `cache` from `new_cache`, the tokens continue those of earlier calls. Raises ValueError past the context.
        """
        return self.logits(self.hidden(tokens, cache))  # B T V

    def hidden(self, tokens: Tensor, cache: "list[LayerCache] | None" = None) -> Tensor:
        """Final hidden states (B, T, C), the input of `logits`. See `forward`."""
        require(tokens.ndim == 2, "token ids must have the shape (B, T); tokens.unsqueeze(0) is a batch of one")
        length = tokens.shape[1]
        rope = self.rope(slice(length) if cache is None else cache[0].positions(length))
        x = self.init_stream(self.dropout(self.embed_tokens(tokens)))  # the stream
        for layer, block in enumerate(self.layers):
            x = block(x, rope, cache[layer] if cache is not None else None, self.recompute)
        return self.final_norm(x)  # B T C

    def logits(self, x: Tensor) -> Tensor:
        """Logits (..., V) of final hidden states (..., C), in training, evaluation and generation."""
        z, cap = self.lm_head(x), self.config.logit_cap
        return cap * torch.tanh(upcast(z) / cap) if cap else z

    def objective(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The terms whose sum training minimizes: the loss, and what you add. Each is logged under its name.

        Logits of large vocabularies would need more memory than the model. They are computed for a few tokens at a
        time, and again in backward.
        """
        x, targets = self.hidden(tokens).flatten(0, 1), targets.flatten()  # N C, N
        if self.config.vocab_size <= LARGE_VOCABULARY:
            sums = [self.terms(x, targets)]
        else:
            parts = zip(x.split(LOSS_TOKENS), targets.split(LOSS_TOKENS), strict=True)
            sums = [checkpoint(self.terms, *part, use_reentrant=False) for part in parts]
        counted = (targets != IGNORED).sum()
        return {name: torch.stack([each[name] for each in sums]).sum() / counted for name in sums[0]}

    def terms(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The sums of the terms over tokens with final hidden states (N, C)."""
        logits = upcast(self.logits(x))  # N V
        terms = {"train_loss": F.cross_entropy(logits, targets, reduction="sum")}
        if self.config.z_loss:  # keeps the softmax's normalizer near 1: PaLM, arXiv 2204.02311
            squares = logits.logsumexp(-1).square().masked_fill(targets == IGNORED, 0)  # N
            terms["z_loss"] = self.config.z_loss * squares.sum()
        return terms

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per token, of the `targets` (B, T) that are not -100, after `tokens` (B, T)."""
        return self.objective(tokens, targets)["train_loss"]

    def next_logits(self, tokens: Tensor, cache: "list[LayerCache]") -> Tensor:
        """Logits (B, V) for the token after the last of `tokens` (B, T)."""
        return self.logits(self.hidden(tokens, cache)[:, -1])  # B V

    def new_cache(self, tokens: int | None = None) -> "list[LayerCache]":
        """An empty cache for `forward` and `next_logits`, with space for `tokens` tokens (default: the context)."""
        return [LayerCache(tokens or self.config.context) for _ in self.layers]

    def tie_weights(self, *_) -> None:
        """Make the head's weight the embedding, if the configuration says so. Loading a state dict calls it."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def _apply(self, fn: Callable, recurse: bool = True) -> "Llama":
        """Keep a tied head tied by `to` and `to_empty`, which may replace each parameter."""
        tied = getattr(self.lm_head, "weight", None) is self.embed_tokens.weight
        super()._apply(fn, recurse)
        if tied:
            self.tie_weights()
        return self


class Block(nn.Module):
    """Attention, then MLP. The placement's residual connections own the norms and are passed the sublayer."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        connection = partial(PLACEMENTS[config.placement].connection, **config.placement_args)
        make_norm = partial(build_norm, config.norm, config.dim, **config.norm_args)
        self.attention_residual = connection(Site("attention", layer, config.layers, config.dim, make_norm, Linear))
        self.self_attn = Attention(config)
        self.mlp_residual = connection(Site("mlp", layer, config.layers, config.dim, make_norm, Linear))
        self.mlp = MLP(config)

    def forward(self, x: Stream, rope: RopeTable, cache: "LayerCache | None" = None, recompute: bool = False) -> Stream:
        if recompute and cache is None and torch.is_grad_enabled():  # within the hooks that gather sharded weights
            return checkpoint(self.forward, x, rope, use_reentrant=False)
        x = self.attention_residual(x, self.self_attn, rope, cache)
        return self.mlp_residual(x, self.mlp)


class Attention(nn.Module):
    """Causal self-attention with rotary positions. H/K query heads share each key/value head (GQA, 2305.13245).

    Sharing shrinks the cache, whose size limits long contexts and large batches in generation.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim, self.group, self.cap = config.head_dim, config.heads // config.kv_heads, config.attention_cap
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.dim, queries, role="query", bias=config.attention_bias)
        self.k_proj = Linear(config.dim, keys, role="key", bias=config.attention_bias)
        self.v_proj = Linear(config.dim, keys, role="value", bias=config.attention_bias)
        self.o_proj = Linear(queries, config.dim, role="attention_out")
        gates = {"none": 0, "head": config.heads, "element": queries}[config.attention_gate]
        self.gate_proj = Linear(config.dim, gates, role="attention_gate") if gates else None
        self.gate_activation = ACTIVATIONS[config.gate_activation]
        self.inner_norm = inner_norm(config, queries)
        self.q_norm = head_norm(config, config.heads, "query")
        self.k_norm = head_norm(config, config.kv_heads, "key")
        self.v_norm = head_norm(config, config.kv_heads, "value")
        self.rotated_q_norm = head_norm(config, config.heads, "query", rotated=True)
        self.rotated_k_norm = head_norm(config, config.kv_heads, "key", rotated=True)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rope: RopeTable, cache: "LayerCache | None" = None) -> Tensor:
        by_head = -1, self.head_dim
        q = self.q_norm(self.q_proj(x).unflatten(-1, by_head))  # B T H D
        k = self.k_norm(self.k_proj(x).unflatten(-1, by_head))  # B T K D
        v = self.v_norm(self.v_proj(x).unflatten(-1, by_head))  # B T K D
        q, k = self.rotated_q_norm(rotate(q, rope)), self.rotated_k_norm(rotate(k, rope))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # B H T D, B K T D twice
        mask, dropout = None, self.dropout.p if self.training else 0.0
        if cache is not None:
            k, v, mask = cache.extend(k, v)  # B K S D twice, T S or None
        causal = mask is None and q.shape[2] > 1  # a single token attends to all that are cached
        shape = q.shape
        if self.group > 1 and q.shape[2] == 1:  # the queries of a key are the rows of one product, B K H/K D
            q = q.reshape(*k.shape[:2], self.group, self.head_dim)
        elif self.group > 1:  # enable_gqa has no fused kernel on older GPUs, in fp32, or with a mask
            k, v = (x.repeat_interleave(self.group, dim=1) for x in (k, v))  # B H S D
        if self.cap:
            y = capped_attention(q, k, v, mask, dropout, causal, self.cap)
        else:  # softmax(q kᵀ / √D + mask) v, B H T D
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        y = y.reshape(shape).transpose(1, 2)  # B T H D
        if self.gate_proj is not None:  # B T H 1 or B T H D. Gated Attention, arXiv 2505.06708
            gate = self.gate_activation(self.gate_proj(x))
            y = y * gate.unflatten(-1, (y.shape[2], -1))
        return self.dropout(self.o_proj(self.inner_norm(y.flatten(2))))  # B T C


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, cap: float
) -> Tensor:
    """F.scaled_dot_product_attention with the scores cap · tanh(score / cap). Gemma 2, arXiv 2408.00118.

    SDPA has no cap, so all scores are in memory: B H T S.
    """
    scores = upcast(q / math.sqrt(q.shape[-1]) @ k.mT)  # B H T S
    scores = cap * torch.tanh(scores / cap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return F.dropout(scores.softmax(-1), dropout).to(v.dtype) @ v  # B H T D


class MLP(nn.Module):
    """down(a(gate(x)) · up(x)): SwiGLU, arXiv 2002.05202, with silu for a. Without a gate, down(a(up(x)))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation, scale = ACTIVATIONS[config.activation], PLACEMENTS[config.placement].scale
        gate = Linear(config.dim, config.hidden_dim, role="gate") if config.mlp == "gated" else None
        self.gate_proj = scale(gate, config) if gate else None
        self.up_proj = scale(Linear(config.dim, config.hidden_dim, role="up"), config)
        self.inner_norm = inner_norm(config, config.hidden_dim)
        self.down_proj = Linear(config.hidden_dim, config.dim, role="down")
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            h = self.activation(self.up_proj(x))
        else:
            h = self.activation(self.gate_proj(x)) * self.up_proj(x)
        return self.dropout(self.down_proj(self.inner_norm(h)))  # B T C


# --- rotary positions ------------------------------------------------------------------------------------------------


def precompute_freqs_cis(
    dim: int, end: int, theta: float = 10000.0, scaling: dict[str, float] | None = None
) -> RopeTable:
    """Cosines and sines, each (end, dim/2) in fp32, of position · theta^(-2i/dim). RoFormer, arXiv 2104.09864.

    With Llama 3's `scaling`, low frequencies are divided by its `factor`. The angles are computed in float64: in fp32
    they are off by 0.004 at position 100,000.
    """
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if scaling:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling["factor"])
    angles = torch.outer(torch.arange(end, dtype=torch.float64, device="cpu"), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, rope: RopeTable) -> Tensor:
    """Rotate each pair of features (i, i + R/2) of `x`, B T H D, by the angle of its position, in at least fp32.

    The product of a rotated query and a rotated key depends on their contents and on the distance of their positions.
    Features i and i + R/2 form a pair, as in Hugging Face's Llama weights. The rest, by default none, is not rotated.
    """
    cos, sin = (table.unsqueeze(1) for table in rope)  # T 1 R/2
    half, wide = cos.shape[-1], x.to(torch.promote_types(x.dtype, cos.dtype))
    a, b, rest = wide.tensor_split((half, 2 * half), dim=-1)  # B T H R/2 twice, B T H D-R
    rotated = a * cos - b * sin, b * cos + a * sin
    return torch.cat((*rotated, rest), dim=-1).to(x.dtype)


class Rope(nn.Module):
    """The table of rotary positions. It is derived from the configuration, so it is not stored in checkpoints."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.context = config.context
        rotated = int(config.head_dim * config.rotary_fraction)  # R
        self.make_table = partial(precompute_freqs_cis, rotated, config.context, config.rope_theta, config.rope_scaling)
        self.cos, self.sin = (nn.Buffer(table, persistent=False) for table in self.make_table())

    def forward(self, positions: slice | Tensor) -> RopeTable:
        if isinstance(positions, slice) and positions.stop > self.context:
            raise ValueError(f"{positions.stop} tokens exceed the model's context of {self.context}")
        return self.cos[positions], self.sin[positions]

    def _apply(self, fn: Callable, recurse: bool = True) -> "Rope":
        """Follow the model to its device, but stay in fp32 under `.bfloat16()` and be refilled after `to_empty`."""
        super()._apply(fn, recurse)
        self.cos, self.sin = (nn.Buffer(table.to(self.cos.device), persistent=False) for table in self.make_table())
        return self


# --- norms inside a sublayer ----------------------------------------------------------------------------------------


def head_norm(config: ModelConfig, heads: int, site: str, rotated: bool = False) -> nn.Module:
    """The norm on queries, keys or values, B T heads D: per head (arXiv 2010.04245), over all heads, or none.

    `--qk-norm` sets it for queries and keys, before or after they are `rotated`. If that is "none", and for values
    without `--v-norm`, the placement decides. The kind is that of the model, or RMSNorm if that does not support single
    heads.
    """
    placement = PLACEMENTS[config.placement]
    if site == "value" and config.v_norm:
        return build_norm("rmsnorm", config.head_dim, elementwise_affine=False, **config.eps)
    if rotated and placement.rotated_norm:
        return placement.rotated_norm(site, config)
    extent = "none" if site == "value" else config.qk_norm
    if extent == "none" and placement.qkv_norm:
        extent = "head"
    if extent == "none" or (site != "value" and rotated != config.qk_norm_after_rope):
        return nn.Identity()
    width = config.head_dim if extent == "head" else heads * config.head_dim
    kind, norm_args = config.head_norm(site)
    norm = build_norm(kind, width, site, **norm_args)
    return norm if extent == "head" else FullWidth(norm)


def inner_norm(config: ModelConfig, width: int) -> nn.Module:
    """With `--inner-norm`, the model's norm before the last matrix of a sublayer. BitNet b1.58, arXiv 2504.12285."""
    return build_norm(config.norm, width, "inner", **config.norm_args) if config.inner_norm else nn.Identity()


class FullWidth(nn.Module):
    """A norm over the features of all heads together, B T H D."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(-2)).view_as(x)


# --- the key/value cache ---------------------------------------------------------------------------------------------


class LayerCache:
    """Keys and values of one layer for the `length` tokens so far, so that later steps need not compute them again.

    Memory for `size` tokens is allocated once.
    """

    def __init__(self, size: int):
        self.size, self.length = size, 0
        self.keys, self.values = torch.empty(0), torch.empty(0)  # B K size D

    def positions(self, new: int) -> slice:
        """The positions of the next `new` tokens."""
        return slice(self.length, self.length + new)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the keys and values of T new tokens, B K T D. Returns all cached ones, B K S D, and a mask.

        The mask says which tokens a new one may attend to, (T, S); None is all, or the earlier ones if none was cached.
        """
        past, new = self.length, k.shape[2]
        if past == 0:
            self.keys, self.values = (x.new_empty(*x.shape[:2], self.size, x.shape[3]) for x in (k, v))
        self.length += new
        for cached, x in ((self.keys, k), (self.values, v)):
            cached.narrow(2, past, new).copy_(x)  # an error past `size`
        mask = k.new_ones(new, self.length, dtype=torch.bool).tril(past) if past and new > 1 else None
        return self.keys[:, :, : self.length], self.values[:, :, : self.length], mask


# --- the embedding ---------------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """An embedding, normalized or not, times a constant as in Gemma, or a learned scalar as in DyT, or 1.

    Not an `nn.Embedding`, so tools that merge adapters reject it: merging would ignore the scale.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.role = EMBEDDING
        self.weight, self.constant = nn.Parameter(torch.zeros(config.vocab_size, config.dim)), config.embedding_scale
        self.scale = nn.Parameter(torch.full((1,), math.sqrt(config.dim))) if config.scaled_embedding else None
        self.norm: nn.Module = nn.Identity()
        if config.embedding_norm != "none":
            gain = config.embedding_norm == "gain"
            self.norm = build_norm("rmsnorm", config.dim, elementwise_affine=gain, **config.eps)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(F.embedding(tokens, self.weight))  # B T C
        if self.constant != 1:
            x = self.constant * x
        return x if self.scale is None else self.scale * x


def check_tie(model: Llama, state: dict[str, Tensor], prefix: str, *arguments) -> None:
    """Before a state dict is loaded: an error unless the head of a tied model, if it is in there, is the embedding."""
    embedding, head = (state.get(f"{prefix}{name}.weight") for name in ("embed_tokens", "lm_head"))
    if not model.config.tie_embeddings or head is None:
        return
    same = embedding is not None and head.data_ptr() == embedding.data_ptr()
    if not same and (embedding is None or not torch.equal(embedding.nan_to_num(), head.nan_to_num())):
        arguments[-1].append("lm_head.weight is not embed_tokens.weight; load it into a Llama(tie_embeddings=False)")
