"""Claim 3. Pre-LayerNorm and pre-RMSNorm with centered weights compute the same function."""

import copy

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from experiments.claims.claim import CONFIRMED, OPEN, REFUTED, Claim, Judgment, Lab, Measured, Protocol
from experiments.claims.initial import initial_model, random_batch
from model import Llama, weights_by_role
from norms import KINDS

WRITERS = ("embedding", "attention_out", "down")  # the roles that write to the residual stream
SHRINKING = 2.0**-29  # the unit roundoff of float64, relative to that of float32
SLACK = 10  # the rounding errors of two computations differ by about this much
LARGE = 1e-6  # a relative difference that float32 could show
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def measure(protocol: Protocol, lab: Lab) -> Measured:
    """Relative differences of logits and gradients between the two models, by seed."""
    rows = []
    for seed in range(protocol.seeds):
        layernorm, rmsnorm = (initial_model(protocol, arm, seed) for arm in protocol.arms)
        draw_gains(layernorm, seed)
        rmsnorm.load_state_dict(layernorm.state_dict())
        tokens, targets = random_batch(layernorm, protocol.settings["rows"], seed)
        for name, dtype in DTYPES.items():
            models = copy.deepcopy(layernorm).to(dtype), copy.deepcopy(rmsnorm).to(dtype)
            uncentered = logit_difference(*models, tokens)
            center(models[1])
            rows.append(
                {
                    "seed": seed,
                    "dtype": name,
                    "logits": logit_difference(*models, tokens),
                    "gradients": gradient_difference(*models, tokens, targets),
                    "uncentered logits": uncentered,
                }
            )
    return {"rows": rows}


@torch.no_grad()
def draw_gains(model: Llama, seed: int) -> None:
    """Draw the gains of all norms: gains of one could hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, tuple(KINDS.values())):
            nn.init.normal_(module.get_parameter("weight"), 1, 0.5, generator=generator)


def centered(role: str, weight: Tensor) -> Tensor:
    """`weight` such that what it writes to the residual stream has mean 0 over the features."""
    if role not in WRITERS:
        return weight
    return weight - weight.mean(1 if role == "embedding" else 0, keepdim=True)


@torch.no_grad()
def center(model: Llama) -> None:
    for role, _, weight in weights_by_role(model):
        weight.copy_(centered(role, weight))


@torch.no_grad()
def logit_difference(layernorm: Llama, rmsnorm: Llama, tokens: Tensor) -> float:
    return relative_difference(rmsnorm(tokens), layernorm(tokens))


def gradient_difference(layernorm: Llama, rmsnorm: Llama, tokens: Tensor, targets: Tensor) -> float:
    """The largest relative difference over all weights.

    By the chain rule, LayerNorm's gradient of a weight is RMSNorm's gradient of the centered weight, centered.
    """
    for model in (layernorm, rmsnorm):
        model.loss(tokens, targets).backward()
    role_of = {id(weight): role for role, _, weight in weights_by_role(rmsnorm)}
    differences = []
    for expected, weight in zip(layernorm.parameters(), rmsnorm.parameters(), strict=True):
        assert expected.grad is not None and weight.grad is not None
        gradient = centered(role_of.get(id(weight), "norm"), weight.grad)
        differences.append(relative_difference(gradient, expected.grad))
    return max(differences)


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def judge(measured: Measured) -> Judgment:
    exact, rounded = ([row for row in measured["rows"] if row["dtype"] == dtype] for dtype in ("float64", "float32"))
    largest = max(max(row["logits"], row["gradients"]) for row in exact)
    uncentered = min(row["uncentered logits"] for row in exact)
    ours = f"relative difference in float64 at most {largest:.1e}; without centering at least {uncentered:.2g}"
    if largest > LARGE:
        return Judgment(REFUTED, ours, f"a difference above {LARGE:g} is more than rounding")
    if uncentered < 0.01:
        return Judgment(OPEN, ours, "the models hardly differ without centering, so they show nothing")
    is_rounding = all(
        row[part] <= SLACK * SHRINKING * in_float32[part]
        for row, in_float32 in zip(exact, rounded, strict=True)
        for part in ("logits", "gradients")
    )
    if is_rounding:
        return Judgment(CONFIRMED, ours, "the difference shrinks from float32 to float64 as rounding does")
    return Judgment(OPEN, ours, "the difference is small, but does not shrink as rounding does")


def plot(measured: Measured) -> Figure:
    """Every seed's differences."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    parts = [(part, dtype) for part in ("logits", "gradients", "uncentered logits") for dtype in DTYPES]
    for height, (part, dtype) in enumerate(parts):
        values = [row[part] for row in measured["rows"] if row["dtype"] == dtype]
        axes.plot(values, [height] * len(values), "o", color="C0" if dtype == "float32" else "C1", alpha=0.6)
    for dtype, color in (("float32", "C0"), ("float64", "C1")):
        axes.axvline(torch.finfo(DTYPES[dtype]).eps / 2, color=color, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(parts)), [f"{part}, {dtype}" for part, dtype in parts])
    axes.set(xscale="log", xlabel="relative difference between the models (dashed: unit roundoff)")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    return figure


CLAIM = Claim(
    number=3,
    name="centered-rmsnorm",
    statement="Pre-LayerNorm without bias and pre-RMSNorm with centered weights compute the same function",
    source="Pre-RMSNorm and Pre-CRMSNorm Transformers, arXiv 2305.14858",
    published="exact",
    rule="A whole Llama with random gains, LayerNorm without bias, and an output head that is not tied to the "
    "embedding; the rows of the embedding and the columns of the output projections are centered for RMSNorm. Largest "
    "differences of logits and gradients, relative to the largest value. Float64 rounds 2²⁹ times more finely than "
    f"float32. Confirmed if both differences in float64 are at most {SLACK}·2⁻²⁹ of those in float32, for every seed, "
    f"and models without centering differ by 1% or more; refuted if one is above {LARGE:g}.",
    protocols={
        "quick": Protocol(
            minutes=0.1,
            flags="--tokenizer bytes --dim 64 --layers 4 --heads 4 --kv-heads 2 --context 32 --no-tie-embeddings "
            "--init xavier --no-fast",
            arms=(
                {"norm": "layernorm:bias=false,eps=1e-5", "placement": "pre"},
                {"norm": "rmsnorm:eps=1e-5", "placement": "pre"},
            ),
            seeds=5,
            settings={"rows": 4},
        )
    },
    measure=measure,
    judge=judge,
    plot=plot,
)
