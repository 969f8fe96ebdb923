"""Claims about training: grids of runs of train.py, and comparisons of their final losses."""

import math

from experiments.claims.claim import Claim, Comparison
from experiments.claims.measure import Protocol, Variants

# 0.23 million parameters, 0.4 million tokens: about half a minute on one core. Bytes, so that no tokenizer is trained;
# nats per token are nats per byte.
CPU_MODEL = "--tokenizer bytes --dim 64 --layers 4 --heads 2 --context 128 --batch-size 8 --dtype float32"
CPU_RUN = f"{CPU_MODEL} --optimizer adamw --steps 400 --eval-every 100 --eval-tokens 32768 --save-every 400 --keep 1"
CPU_LRS = (1e-3, 3e-3, 1e-2)

# 0.27 million parameters in 12 blocks. Xavier's init, under which the troubles of depth show at this width.
DEEP_RUN = (
    "--tokenizer bytes --dim 40 --layers 12 --heads 2 --context 128 --batch-size 8 --dtype float32 --init xavier "
    "--optimizer adamw --steps 200 --eval-every 100 --eval-tokens 32768 --save-every 200 --keep 1"
)
# 0.2 to 2.6 million parameters in 4 to 48 blocks.
DEPTH_RUN = (
    "--tokenizer bytes --dim 64 --heads 2 --context 64 --batch-size 8 --dtype float32 --optimizer adamw --steps 100 "
    "--init xavier --eval-every 100 --eval-tokens 16384 --save-every 100 --keep 1 --norm layernorm"
)
DEPTH_LRS = (3e-4, 1e-3, 3e-3)

# 27 million parameters, 65 million tokens: about 10 minutes on an H100.
GPU_RUN = (
    "--preset small --dropout 0 --optimizer adamw --steps 2000 --eval-every 200 --save-every 2000 --dtype bfloat16 "
    "--compile"
)
GPU_LRS = (3e-4, 1e-3, 3e-3, 1e-2)

# For DyT and Derf, which do not rescale what they get. With the init and embedding of the other runs, the residual
# stream is so small at this width that they learn only the frequencies of the bytes.
NO_STATISTICS = "--init xavier --scaled-embedding"


Arms = dict[str, Variants]


def pre(*norms: str, **more: str) -> Variants:
    """Pre-norm with these norms, of which the best is reported."""
    return [{"norm": norm, "placement": "pre", **more} for norm in norms]


def depths(*layers: int) -> Arms:
    return {
        f"{name} {placement}": [{"placement": placement, "layers": str(depth)}]
        for name, depth in zip(("shallow", "medium", "deep", "deepest"), layers, strict=True)
        for placement in ("post", "deepnorm")
    }


def warmups(steps: int) -> Arms:
    return {
        placement + suffix: [{"norm": "layernorm", "placement": placement, "warmup": warmup}]
        for suffix, warmup in (("", str(steps)), (" without warmup", "0"))
        for placement in ("pre", "post")
    }


def lengths(steps: int) -> Arms:
    """nGPT without warmup, like its authors."""
    ngpt = {"norm": "rmsnorm", "placement": "ngpt", "warmup": "0"}
    half, quarter = ({"steps": str(steps // part), "save_every": str(steps // part)} for part in (2, 4))
    return {"pre-norm": pre("rmsnorm"), "nGPT": [ngpt], "half nGPT": [ngpt | half], "quarter nGPT": [ngpt | quarter]}


def batches(*sizes: int) -> Arms:
    """3200 sequences in all, whatever the batch size."""
    arms: Arms = {}
    for size in sizes:
        steps = str(3200 // size)
        shared = {"batch_size": str(size), "steps": steps, "eval_every": steps, "save_every": steps}
        arms |= {f"{norm} at {size}": pre(norm.lower(), **shared) for norm in ("LayerNorm", "BatchNorm")}
    return arms


RMSNORM_LAYERNORM: Arms = {"LayerNorm": pre("layernorm"), "RMSNorm": pre("rmsnorm")}
DYT: Arms = {"RMSNorm": pre("rmsnorm"), "DyT": pre("dyt:alpha=1.0", "dyt:alpha=4.0", "dyt:alpha=16.0")}
DERFS = ("derf:alpha=0.25", "derf:alpha=1.0", "derf:alpha=4.0", "derf:alpha=16.0")
DERF: Arms = {
    "RMSNorm": pre("rmsnorm"),
    "Derf": pre(*DERFS),
    "RMSNorm with Muon": pre("rmsnorm", optimizer="muon"),
    "Derf with Muon": pre(*DERFS, optimizer="muon"),
}
LNS: Arms = {
    "pre-norm": pre("rmsnorm", depth_scaled_init="false"),
    "depth-scaled init": pre("rmsnorm", depth_scaled_init="true"),
    "LNS": [{"norm": "rmsnorm", "placement": "lns", "depth_scaled_init": "false"}],  # scales by depth itself
}

CLAIMS = (
    Claim(
        "rmsnorm-layernorm",
        "RMSNorm is as good as LayerNorm",
        source="articles 002 and 003; Root Mean Square Layer Normalization, arXiv 1910.07467",
        published="comparable",
        rule="Both with pre-norm.",
        protocols={
            # Seeds 0 to 7 came out as -0.007 ± 0.019, inconclusive. These are 20 others.
            "cpu": Protocol(15, RMSNORM_LAYERNORM, CPU_RUN, CPU_LRS, seeds=tuple(range(8, 28))),
            "gpu": Protocol(300, RMSNORM_LAYERNORM, GPU_RUN, GPU_LRS),
        },
        comparisons=(Comparison({"RMSNorm": 1, "LayerNorm": -1}, "within", 0.02),),
    ),
    Claim(
        "prenorm-stability",
        "Pre-norm is more stable when deep, and needs no warmup where post-norm does",
        source="article 002; On Layer Normalization in the Transformer Architecture, arXiv 2002.04745",
        published="BLEU 8.45 without warmup against about 34 with it, for post-norm",
        rule="12 blocks, Xavier init, with a warmup of a tenth of the steps and without. The second comparison is what "
        "warmup takes from the loss of post-norm minus what it takes from that of pre-norm.",
        protocols={
            "cpu": Protocol(35, warmups(80), f"{DEEP_RUN} --steps 800 --save-every 800", CPU_LRS),
            "gpu": Protocol(900, warmups(200), f"{GPU_RUN} --layers 12 --init xavier", GPU_LRS),
        },
        comparisons=(
            Comparison({"post without warmup": 1, "pre without warmup": -1}, "above"),
            Comparison({"post without warmup": 1, "post": -1, "pre without warmup": -1, "pre": 1}, "above"),
        ),
        must_learn=("pre", "post"),
    ),
    Claim(
        "deepnorm-depth",
        "Deep post-norm fails, DeepNorm trains",
        source="DeepNet, arXiv 2203.00555",
        published="1000 layers",
        rule="4 (shallow), 12 (medium), 24 (deep) and 48 (deepest) blocks; on GPUs 4, 24, 48 and 96. If most runs of "
        "shallow post-norm fail, depth is not the reason.",
        protocols={
            "cpu": Protocol(25, depths(4, 12, 24, 48), DEPTH_RUN, DEPTH_LRS),
            "gpu": Protocol(120, depths(4, 24, 48, 96), f"{DEPTH_RUN} --steps 500", DEPTH_LRS),
        },
        comparisons=(
            Comparison({"deepest post": 1, "deepest deepnorm": -1}, "above", value="failed"),
            Comparison({"deep post": 1, "deep deepnorm": -1}, "anything", value="failed"),
            Comparison({"medium post": 1, "medium deepnorm": -1}, "anything", value="failed"),
            Comparison({"shallow post": 1, "shallow deepnorm": -1}, "anything", value="failed"),
        ),
        must_learn=("shallow post",),
    ),
    Claim(
        "lns-depth-scaled-init",
        "LNS helps pre-norm, but no more than depth-scaled initialization does",
        source="The Curse of Depth, arXiv 2502.05795",
        published="perplexity 26.73 to 25.76 at 130M",
        rule="LNS and pre-norm with plain and with depth-scaled init, 12 blocks.",
        protocols={"gpu": Protocol(600, LNS, f"{GPU_RUN} --layers 12", GPU_LRS)},
        comparisons=(
            Comparison({"LNS": 1, "pre-norm": -1}, "below"),
            Comparison({"LNS": 1, "depth-scaled init": -1}, "above", -0.005),
        ),
    ),
    Claim(
        "batchnorm-small-batch",
        "BatchNorm suffers at small batch sizes, LayerNorm does not",
        source="articles 002, 003 and 004; Group Normalization, arXiv 1803.08494",
        published="10.6 points of accuracy at batch 2, in images",
        rule="Batch sizes 32, 8 and 2 at equal numbers of tokens; BatchNorm is evaluated with running statistics.",
        protocols={
            "cpu": Protocol(
                35, batches(32, 8, 2), f"{CPU_MODEL} --optimizer adamw --eval-tokens 32768 --keep 1", CPU_LRS
            )
        },
        comparisons=(
            Comparison(
                {"BatchNorm at 2": 1, "LayerNorm at 2": -1, "BatchNorm at 32": -1, "LayerNorm at 32": 1},
                "above",
                negligible=0.02,
            ),
            Comparison({"BatchNorm at 32": 1, "LayerNorm at 32": -1}, "anything"),
            Comparison({"BatchNorm at 8": 1, "LayerNorm at 8": -1}, "anything"),
            Comparison({"BatchNorm at 2": 1, "LayerNorm at 2": -1}, "anything"),
        ),
    ),
    Claim(
        "qk-norm-rates",
        "QK-norm widens the range of stable learning rates",
        source="Small-scale proxies for large-scale Transformer training instabilities, arXiv 2309.14322",
        published="no single figure",
        rule="By seed, the range is the largest over the smallest learning rate whose loss is within 0.1 nats of the "
        "best; with QK-norm per head. Ranges within a factor of 1.5 (0.405 in logarithms) count as equal.",
        protocols={
            "gpu": Protocol(
                1120,
                {"plain": [{"qk_norm": "none"}], "QK-norm": [{"qk_norm": "head"}]},
                GPU_RUN,
                lrs=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
                select_lr=False,
                seeds=tuple(range(8)),
            )
        },
        comparisons=(Comparison({"QK-norm": 1, "plain": -1}, "above", value="log_lr_range", negligible=math.log(1.5)),),
    ),
    Claim(
        "derf-muon",
        "Derf wins with AdamW and loses with Muon",
        source="arXiv 2604.01563",
        published="a penalty of 0.66 nats with Muon",
        rule="Derf at its best initial alpha, with AdamW and with Muon.",
        protocols={
            "cpu": Protocol(20, DERF, f"{CPU_RUN} {NO_STATISTICS}", CPU_LRS),
            "gpu": Protocol(600, DERF, f"{GPU_RUN} {NO_STATISTICS}", GPU_LRS),
        },
        comparisons=(
            Comparison({"Derf": 1, "RMSNorm": -1}, "below"),
            Comparison({"Derf with Muon": 1, "RMSNorm with Muon": -1}, "above"),
            Comparison({"Derf with Muon": 1, "RMSNorm with Muon": -1, "Derf": -1, "RMSNorm": 1}, "above"),
        ),
    ),
    Claim(
        "ngpt-steps",
        "nGPT needs 4 to 20 times fewer steps",
        source="nGPT, arXiv 2410.01131",
        published="4 to 20 times",
        rule="nGPT with all, half and a quarter of the steps that pre-norm RMSNorm has. The learning rate decays to 0.",
        protocols={
            "cpu": Protocol(20, lengths(400), CPU_RUN, CPU_LRS),
            "gpu": Protocol(600, lengths(2000), GPU_RUN, GPU_LRS),
        },
        comparisons=(
            Comparison({"quarter nGPT": 1, "pre-norm": -1}, "below", 0.02),
            Comparison({"half nGPT": 1, "pre-norm": -1}, "anything"),
            Comparison({"nGPT": 1, "pre-norm": -1}, "anything"),
        ),
    ),
    Claim(
        "dyt-fixed-compute",
        "DyT is worse than RMSNorm at fixed compute",
        source="the development log of nanochat, without seeds; against arXiv 2503.10622",
        published="worse, no figure",
        rule="DyT at its best initial alpha.",
        protocols={
            "cpu": Protocol(15, DYT, f"{CPU_RUN} {NO_STATISTICS}", CPU_LRS),
            "gpu": Protocol(600, DYT, f"{GPU_RUN} {NO_STATISTICS}", GPU_LRS),
        },
        comparisons=(Comparison({"DyT": 1, "RMSNorm": -1}, "above", negligible=0.005),),
    ),
)
