"""Claims that train nothing. Each has its own measurement: a value by arm and seed, in seconds."""

import torch

from experiments.claims.claim import Claim, Comparison
from experiments.claims.measure import Lab, Measured, Protocol
from norms import build_norm

NORMS = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}
FEATURES, OUTLIER = 512, 100.0


@torch.no_grad()
def measure_outliers(protocol: Protocol, lab: Lab) -> Measured:
    """What one outlier leaves of the other outputs: their standard deviation relative to that without it."""
    rows = []
    for seed in protocol.seeds:
        clean = torch.randn(FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = clean.clone()
        x[0] = OUTLIER
        for (arm,) in protocol.arms.values():
            norm = build_norm(arm["norm"], FEATURES)
            rows.append({"arm": arm, "seed": seed, "left": float(norm(x)[1:].std() / norm(clean)[1:].std())})
    return {"runs": rows}


CLAIMS = (
    Claim(
        "outliers",
        "RMSNorm is more robust to outliers than LayerNorm",
        source="article 003",
        published="none; measured before: both shrink the rest to 0.22",
        rule="One of 512 standard normal values is 100. What is left is the standard deviation of the others after the "
        "norm, relative to that without the outlier.",
        protocols={
            "quick": Protocol(0.1, {name: [{"norm": kind}] for name, kind in NORMS.items()}, seeds=tuple(range(50)))
        },
        comparisons=(
            Comparison({"RMSNorm": 1, "LayerNorm": -1}, "above", 0.01, "left"),
            Comparison({"RMSNorm": 1}, "anything", value="left"),
        ),
        measure=measure_outliers,
    ),
)
