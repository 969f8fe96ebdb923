"""A LLaMA in one file, trained on the bytes of a text: `python examples/minimal.py`. Read it from top to bottom.
LLaMA, arXiv 2302.13971, is the Transformer's decoder alone, with pre-norm RMSNorm, rotary positions and SwiGLU.
tests/test_minimal.py shows that model.py, and train.py with --optimizer adamw, compute the same. Shapes in comments:
    B sequences   T new tokens   S tokens with those in the cache; without one, S = T   and the letters below
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V = 256  # possible tokens: a token is a byte
C = 128  # features of a token: the width of x, the residual stream, to which each sublayer adds
L = 4  # blocks, each with attention and an MLP
H = 4  # query heads
K = 2  # key/value heads: H/K query heads share one, so generate() caches fewer (GQA, arXiv 2305.13245)
D = C // H  # features per head
M = 352  # features inside the MLP, about 8/3 of C: three matrices, as large as two with 4·C in the original MLP
CONTEXT = 256  # maximum of S
BATCH = 8  # B in training


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over a token's features. The scale of x does not matter. arXiv 1910.07467."""

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        mean_square = x.square().mean(-1, keepdim=True)  # B T 1
        return x / torch.sqrt(mean_square + self.eps) * self.weight  # B T C


class LayerNorm(RMSNorm):
    """(x − μ) / sqrt(σ² + eps) · weight + bias: RMSNorm of x − μ, as σ² is its mean square. arXiv 1607.06450."""

    def __init__(self, eps: float = 1e-5):
        super().__init__(eps)
        self.bias = nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True)) + self.bias  # B T C


def rope_table() -> Tensor:
    """Cosines and sines of the angles position · 10000^(-2i/D), for i below D/2. Rotary positions, arXiv 2104.09864."""
    frequencies = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)  # D/2
    angles = torch.outer(torch.arange(CONTEXT, dtype=torch.float64), frequencies)  # CONTEXT D/2
    return torch.stack([angles.cos(), angles.sin()]).float()  # 2 CONTEXT D/2


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate features i and i + D/2, a point in the plane, by the i-th angle of their token's position.

    Turning a query and a key by the same angle leaves their product. So of positions, only the distance matters.
    """
    cos, sin = rope  # T D/2 twice
    a, b = x.chunk(2, dim=-1)  # B H T D/2 twice; for keys, K in place of H
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)  # B H T D


class Attention(nn.Module):
    """softmax(q kᵀ / √D) v: each token gets a weighted mean of the values of earlier tokens and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(C, H * D, bias=False), nn.Linear(H * D, C, bias=False)
        self.k_proj, self.v_proj = nn.Linear(C, K * D, bias=False), nn.Linear(C, K * D, bias=False)

    def forward(self, x: Tensor, rope: Tensor, cache: Tensor | None) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (H, D)).transpose(1, 2)  # B H T D
        k = self.k_proj(x).unflatten(-1, (K, D)).transpose(1, 2)  # B K T D
        v = self.v_proj(x).unflatten(-1, (K, D)).transpose(1, 2)  # B K T D
        q, k = rotate(q, rope), rotate(k, rope)
        T, S = x.shape[1], x.shape[1] if cache is None else cache.shape[3]  # new token t is at position S - T + t
        if cache is not None:  # 2 B K S D: keys and values of earlier tokens, then space for those of the T new ones
            cache[..., S - T :, :] = torch.stack([k, v])  # into generate's tensor: `cache` is a view of it
            k, v = cache  # B K S D twice
        k, v = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1)  # B H S D twice
        scores = q @ k.mT / math.sqrt(D)  # B H T S
        future = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)  # T S: true where s > S - T + t
        weights = scores.masked_fill(future, -math.inf).softmax(-1)  # B H T S
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))  # B H T D, B T H·D, B T C


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), where silu(z) = z · sigmoid(z): SwiGLU, arXiv 2002.05202."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(C, M, bias=False), nn.Linear(C, M, bias=False)
        self.down_proj = nn.Linear(M, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # B T M, then B T C


class Block(nn.Module):
    """x + f(N(x)) for pre-norm, N(x + f(x)) for post-norm. N is a norm of this kind; f is attention, then the MLP."""

    def __init__(self, kind: type[RMSNorm], placement: str):
        super().__init__()
        self.self_attn, self.mlp = Attention(), MLP()
        self.attention_norm, self.mlp_norm = kind(), kind()
        self.placement = placement

    def forward(self, x: Tensor, rope: Tensor, cache: Tensor | None) -> Tensor:
        if self.placement == "pre":
            x = x + self.self_attn(self.attention_norm(x), rope, cache)
            return x + self.mlp(self.mlp_norm(x))  # B T C
        x = self.attention_norm(x + self.self_attn(x, rope, cache))
        return self.mlp_norm(x + self.mlp(x))  # B T C


class Llama(nn.Module):
    """Token ids in, B T; out come logits for the token after each of them, B T V."""

    def __init__(self, norm: str = "rmsnorm", placement: str = "pre"):
        super().__init__()
        kind = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[norm]
        self.embed_tokens = nn.Embedding(V, C)
        self.layers = nn.ModuleList(Block(kind, placement) for _ in range(L))
        self.final_norm = kind() if placement == "pre" else nn.Identity()  # a post-norm block ends with a norm
        self.rope = nn.Buffer(rope_table(), persistent=False)  # moves with the model, but is neither trained nor saved
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # 2·L results add up in x, so their matrices start smaller by √(2·L)
                into_x = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * L) if into_x else 0.02)

    def forward(self, tokens: Tensor, cache: Tensor | None = None, past: int = 0) -> Tensor:
        """A cache, L 2 B K CONTEXT D, has keys and values of `past` earlier tokens, and gets those of the new ones."""
        S = past + tokens.shape[1]
        rope = self.rope[:, past:S]  # 2 T D/2
        x = self.embed_tokens(tokens)  # B T C
        for layer, block in enumerate(self.layers):
            x = block(x, rope, None if cache is None else cache[layer, ..., :S, :])
        return self.final_norm(x) @ self.embed_tokens.weight.T  # B T V: the embedding is also the output matrix


def random_batches(text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of windows at random places of the text: inputs, and for each the token that follows. Both B T."""
    while True:
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), device=text.device)  # B 1
        windows = text[starts + torch.arange(CONTEXT + 1, device=text.device)].long()  # B T+1
        yield windows[:, :-1], windows[:, 1:]


def train(model: Llama, batches: Iterator[tuple[Tensor, Tensor]], steps: int, peak: float) -> Iterator[float]:
    """Yield each step's loss, as it is taken. The learning rate rises for a twentieth of the steps, then falls to 0."""
    decayed = {weight for weight in model.layers.parameters() if weight.ndim == 2}  # the matrices of the blocks
    others = [weight for weight in model.parameters() if weight not in decayed]
    groups = [{"params": list(decayed), "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer, warmup = torch.optim.AdamW(groups, betas=(0.9, 0.95)), steps // 20
    for step, (inputs, targets) in zip(range(steps), batches, strict=False):  # batches may have no end
        for group in optimizer.param_groups:
            group["lr"] = peak * ((step + 1) / warmup if step < warmup else (steps - step) / (steps - warmup))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())  # of B·T V and B·T, nats per token
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def evaluate(model: Llama, text: Tensor) -> float:
    """The mean loss of every eighth window of the text."""
    windows = text.unfold(0, CONTEXT + 1, 8 * CONTEXT).long()  # N T+1, for N windows
    losses = [F.cross_entropy(model(window[None, :-1])[0], window[1:]) for window in windows]
    return torch.stack(losses).mean().item()


@torch.no_grad()
def generate(model: Llama, tokens: Tensor, count: int, temperature: float = 0.8) -> Tensor:
    """Append `count` drawn tokens to `tokens`, B T: at most CONTEXT in all. A low temperature favors likely ones."""
    cache, past = model.rope.new_zeros(L, 2, len(tokens), K, CONTEXT, D), 0  # on the model's device
    for _ in range(count):
        logits = model(tokens[:, past:], cache, past)[:, -1]  # B V. Only tokens that are not in the cache are computed.
        past = tokens.shape[1]
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1)  # B 1
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small LLaMA on the bytes of a text, and sample from it.")
    parser.add_argument("--data", type=Path, help="a text file (default: modules of Python's standard library)")
    parser.add_argument("--norm", choices=["rmsnorm", "layernorm"], default="rmsnorm", help="default: rmsnorm")
    parser.add_argument("--placement", choices=["pre", "post"], default="pre", help="of norms (default: pre)")
    parser.add_argument("--steps", type=int, default=600, help="default: 600, two minutes on a CPU")
    parser.add_argument("--lr", type=float, default=0.004, help="peak of the learning rate (default: 0.004)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    files = [args.data] if args.data else sorted(Path(argparse.__file__).parent.glob("*.py"))
    data = bytearray().join(file.read_bytes() for file in files if file.is_file())  # torch wants it writable
    if len(data) < 20 * CONTEXT:  # a tenth is held out, and has to hold a window
        parser.error(f"--data {args.data}: no file of {20 * CONTEXT:,} bytes or more")
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training, validation = torch.frombuffer(data, dtype=torch.uint8).to(device).tensor_split([len(data) * 9 // 10])
    model = Llama(args.norm, args.placement).to(device)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters on {device}, {len(data):,} bytes")
    for step, loss in enumerate(train(model, random_batches(training), args.steps, args.lr), 1):
        if step == 1 or step % 50 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    loss = evaluate(model, validation)
    print(f"validation loss {loss:.4f} nats or {loss / math.log(2):.4f} bits per byte")
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(encoding="utf-8")
    print(bytes(generate(model, validation[None, :1].long(), CONTEXT - 1)[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
