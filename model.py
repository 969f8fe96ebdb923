"""A decoder-only transformer in the style of LLaMA (arXiv 2302.13971) with a configurable norm and placement.

Shapes in comments:
    B sequences   T new tokens   S tokens including cached ones   C features (dim)   V vocabulary size
    H query heads   K key/value heads   D features per head   R of them with rotary positions
A `cache` is a list with a `LayerCache` for each layer.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from config import ModelConfig
from files import require
from norms import TRAITS, build_norm
from norms.numerics import upcast
from norms.placement import PLACEMENTS, Site

RopeTable = tuple[Tensor, Tensor]  # cosines and sines, each T R/2
LARGE_VOCABULARY = 1 << 16  # with more ids, the loss is computed for LOSS_TOKENS tokens at a time
LOSS_TOKENS = 1 << 12


class Llama(nn.Module):
    """Token ids in, logits out. `Llama(dim=64)` is short for `Llama(ModelConfig(dim=64))`.

    The initial weights depend only on `config` and `seed`. Under `torch.device("meta")` the parameters have no storage,
    ready for `load_state_dict(..., assign=True)`.

    Training and generation run it under `torch.autocast`: matrix products in --dtype; weights, norms and the residual
    stream in fp32.
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
        self.init_stream = placement.init_stream  # the embedding -> the residual stream, or a pair of streams
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        make_norm = partial(build_norm, config.norm, config.dim, **config.norm_args)
        self.final_norm = placement.final_norm(make_norm)  # nn.Identity where the placement has none
        self.lm_head = Linear(config.dim, config.vocab_size, role="head")
        self.tie_weights()
        self.register_load_state_dict_pre_hook(check_tie)
        self.register_load_state_dict_post_hook(Llama.tie_weights)
        if placement.extend:
            placement.extend(self)
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
        x = self.init_stream(self.dropout(self.embed_tokens(tokens)))  # B T C
        for layer, block in enumerate(self.layers):
            if self.recompute and cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x = block(x, rope, cache[layer] if cache is not None else None)
        return self.final_norm(x)  # B T C

    def logits(self, x: Tensor) -> Tensor:
        """Logits (..., V) of final hidden states (..., C), in training, evaluation and generation."""
        return self.lm_head(x)

    def objective(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The terms whose sum training minimizes: the loss, and what you add. Each is logged under its name."""
        return {"train_loss": self.cross_entropy(self.hidden(tokens).flatten(0, 1), targets.flatten())}

    def cross_entropy(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in nats, of predicting `targets` (N) from final hidden states (N, C).

        Logits of large vocabularies would need more memory than the model. They are computed for a few tokens at a
        time, and again in backward.
        """
        if self.config.vocab_size <= LARGE_VOCABULARY:
            return F.cross_entropy(upcast(self.logits(x)), targets)
        parts = zip(x.split(LOSS_TOKENS), targets.split(LOSS_TOKENS), strict=True)
        losses = [checkpoint(self._sum_of_losses, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / len(targets)

    def _sum_of_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(upcast(self.logits(x)), targets, reduction="sum")

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per token, of predicting `targets` (B, T) from `tokens` (B, T)."""
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
        connection = PLACEMENTS[config.placement].connection
        make_norm = partial(build_norm, config.norm, config.dim, **config.norm_args)
        self.attention_residual = connection(Site("attention", layer, config.layers, config.dim, make_norm))
        self.self_attn = Attention(config)
        self.mlp_residual = connection(Site("mlp", layer, config.layers, config.dim, make_norm))
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rope: RopeTable, cache: "LayerCache | None" = None) -> Tensor:
        x = self.attention_residual(x, self.self_attn, rope, cache)
        return self.mlp_residual(x, self.mlp)


class Attention(nn.Module):
    """Causal self-attention with rotary positions. H/K query heads share each key/value head (GQA, 2305.13245).

    Sharing shrinks the cache, whose size limits long contexts and large batches in generation.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim, self.group = config.head_dim, config.heads // config.kv_heads
        self.q_proj = Linear(config.dim, config.heads * config.head_dim, role="query")
        self.k_proj = Linear(config.dim, config.kv_heads * config.head_dim, role="key")
        self.v_proj = Linear(config.dim, config.kv_heads * config.head_dim, role="value")
        self.o_proj = Linear(config.heads * config.head_dim, config.dim, role="attention_out")
        self.q_norm = head_norm(config, config.heads, "query")
        self.k_norm = head_norm(config, config.kv_heads, "key")
        self.v_norm = head_norm(config, config.kv_heads, "value")
        self.rotated_q_norm, self.rotated_k_norm = nn.Identity(), nn.Identity()  # replaced by --placement ngpt
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rope: RopeTable, cache: "LayerCache | None" = None) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # B T H D
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))  # B T K D
        v = self.v_norm(self.v_proj(x).unflatten(-1, (-1, self.head_dim)))  # B T K D
        q, k = self.rotated_q_norm(rotate(q, rope)), self.rotated_k_norm(rotate(k, rope))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # B H T D, B K T D twice
        mask, dropout = None, self.dropout.p if self.training else 0.0
        if cache is not None:
            k, v, mask = cache.extend(k, v)  # B K S D twice, T S or None
        causal = mask is None and q.shape[2] > 1  # a single token attends to all that are cached
        if self.group > 1:  # enable_gqa has no fused kernel on older GPUs, in fp32, or with a mask
            k, v = (x.repeat_interleave(self.group, dim=1) for x in (k, v))  # B H S D
        # softmax(q kᵀ / √D + mask) v, B H T D
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return self.dropout(self.o_proj(y.transpose(1, 2).flatten(2)))  # B T C


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)). GLU Variants Improve Transformer, arXiv 2002.05202."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.dim, config.hidden_dim, role="gate")
        self.up_proj = Linear(config.dim, config.hidden_dim, role="up")
        self.down_proj = Linear(config.hidden_dim, config.dim, role="down")
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))  # B T C


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
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


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


# --- norms on queries, keys and values -------------------------------------------------------------------------------


def head_norm(config: ModelConfig, heads: int, site: str) -> nn.Module:
    """The norm on queries, keys or values, B T heads D: per head (arXiv 2010.04245), over all heads, or none.

    `--qk-norm` sets it for queries and keys. If that is "none", and always for values, the placement decides. It uses
    the model's norm, or RMSNorm if that norm does not support single heads.
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
    """An embedding, times a constant as in Gemma, or a learned scalar, √dim at the start (arXiv 2503.10622), or 1.

    Not an `nn.Embedding`, so tools that merge adapters reject it: merging would ignore the scale.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.role = EMBEDDING
        self.weight, self.constant = nn.Parameter(torch.zeros(config.vocab_size, config.dim)), config.embedding_scale
        self.scale = nn.Parameter(torch.full((1,), math.sqrt(config.dim))) if config.scaled_embedding else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weight)  # B T C
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


# --- matrices and their roles ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """What a matrix is for. Initial weights, optimizers, generation and placements ask it."""

    name: str
    hidden: bool = True  # in a block: Muon trains it, and it is decayed
    into_stream: bool = False  # a projection into the residual stream
    low_precision: bool = True  # stored in the dtype of products if the model only generates


EMBEDDING = Role("embedding", hidden=False, low_precision=False)
ROLES = [EMBEDDING, *map(Role, ("query", "key", "value", "gate", "up")), Role("head", hidden=False)]
ROLES += [Role("attention_out", into_stream=True), Role("down", into_stream=True)]


class Linear(nn.Linear):
    """`nn.Linear` without a bias, whose weight is drawn by its role, a name in `ROLES`, and is zero until then."""

    def __init__(self, inputs: int, outputs: int, role: str):
        self.role = next((each for each in ROLES if each.name == role), None)  # known when the weight is made
        require(self.role, f"role {role!r} is not known: add it to ROLES in model.py")
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def matrices(model: Llama) -> Iterator[tuple[Role, str, nn.Parameter]]:
    """Role, Hugging Face name and weight of every matrix of `model`; a tied one once, as the embedding."""
    for path, module in model.named_modules():
        role = getattr(module, "role", None)
        if role and not (module is model.lm_head and module.weight is model.embed_tokens.weight):
            yield role, f"{'' if module is model.lm_head else 'model.'}{path}.weight", module.weight


@torch.no_grad()
def draw_weights(model: Llama, seed: int, copy: Callable = Tensor.copy_) -> None:
    """Draw every matrix from N(0, std²), std by its role. Norms and residual connections initialize their parameters.

    The unscaled draw is a function of the seed, the matrix's Hugging Face name (or its path) and its shape, and is made
    on the CPU: models that differ in their norm start from the same weights, on every device. `copy` puts it into a
    weight, which may be sharded. Raises ValueError for a matrix without a role.
    """
    drawn = {id(weight) for _, _, weight in matrices(model)}
    for name, weight in model.named_parameters():
        known = weight.ndim < 2 or id(weight) in drawn or "norm" in name or "residual" in name
        require(known, f"{name} is a matrix without a role; make it with model.Linear(inputs, outputs, role)")
    for role, name, weight in matrices(model):
        if not weight.is_meta:
            source = hashlib.sha256(f"{seed} {name} {tuple(weight.shape)}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(source[:7]))
            draw = torch.randn(weight.shape, generator=generator, device="cpu")
            copy(weight, draw * initial_std(model.config, role, weight.shape))
    if after_step := PLACEMENTS[model.config.placement].after_step:
        after_step(model)


def initial_std(config: ModelConfig, role: Role, shape: torch.Size) -> float:
    """Initial standard deviation of a weight of `shape`.

    `normal` is 0.02, divided by sqrt(2 layers) for the projections into the residual stream (GPT-2). `xavier` is
    sqrt(2 / (inputs + outputs)), but 0.02 for the embedding, whose rows are looked up, not summed over.
    """
    placement, scaled = PLACEMENTS[config.placement], config.depth_scaled_init
    gain = placement.init_gain(role.name, config.layers)
    if config.init == "xavier" and role.name != "embedding":
        return gain * math.sqrt(2 / sum(shape))
    if (placement.depth_scaled if scaled is None else scaled) and role.into_stream:
        gain /= math.sqrt(2 * config.layers)
    return gain * 0.02
