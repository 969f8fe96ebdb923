"""Every option, declared once as the field of a dataclass, the presets, and how what was asked becomes a configuration.

What was asked is a mapping of options to values, wherever it comes from: flags, `train()`, an ablation, a run.json.
"""

import dataclasses
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from files import Json, is_a, require
from norms import KINDS, TRAITS, build_norm
from norms.placement import PLACEMENTS, Site, check_placement
from norms.registry import Traits
from recipes import RECIPES

Asked = Json  # options by the names of fields, "preset" and "recipe"; or arguments of a norm or placement

MAX_SIZE = 2**31 - 1  # File formats use 32-bit integers for every dimension.
MAX_LAYERS = 1 << 12  # Python builds a thousand in two seconds.
DEVICES = "auto, cpu, cuda, cuda:N for one of several GPUs, or mps"  # `machine.device.pick_device` checks --device
DTYPES = ["auto", "float32", "bfloat16", "float16"]
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
FIXED_ON_RESUME = ("tokenizer", "seed", "batch_size", "order", "optimizer")  # The model is fixed as well.
ARGUMENTS = {"norm_args": "norm", "qk_norm_args": "norm", "placement_args": "placement"}  # and what they are for
# Options about a part of the model, and the option that adds the part, unless it is "none".
NEEDS = {"qk_norm_args": "qk_norm", "qk_norm_after_rope": "qk_norm", "gate_activation": "attention_gate"}
# Comparisons of a value with a bound, and what an error says. NaN is within no bounds.
COMPARISONS = {"at least": operator.ge, "at most": operator.le, "above": operator.gt, "below": operator.lt}
COUNT = {"at least": 1, "at most": MAX_SIZE}
NOT_NEGATIVE = {"at least": 0, "below": math.inf}
POSITIVE = {"above": 0, "below": 1e36}  # an optimizer multiplies it, and fp32 ends at 3e38
FRACTION = {"at least": 0, "below": 1}
USUAL_BOUNDS: dict[Any, Mapping[str, float]] = {int: COUNT, float: NOT_NEGATIVE}
WSD_DECAY = 0.2  # fraction of all steps in which the schedule `wsd` decays
NOT_PRETRAINED = ("context", "trained_context", "dropout")  # these may differ from those of --init-from


def option(default: Any, help: str, export: str = "computed", bounds: Mapping[str, float] = {}, **argument: Any) -> Any:
    """A dataclass field that is also a flag, unless it has no help. Extra keywords go to argparse's `add_argument`.

    bounds: of a number that is not None, as in COMPARISONS, if not those that are usual for its type.
    export: "carried" if the configurations of transformers have it, "training" if it does not change what a trained
        model computes. A computed option must be at its default for an architecture that does not name it.
    """
    metadata = {"help": help, "export": export, "bounds": bounds, **argument}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


carried = partial(option, export="carried")  # an option that the configurations of transformers have


def flag_name(option_name: str) -> str:
    """The flag that sets an option, such as "--norm-arg"."""
    return "--" + (option_name[:-1] if option_name in ARGUMENTS else option_name).replace("_", "-")


def as_text(value: Any) -> str:
    """An option's value as its flag takes it."""
    if isinstance(value, dict):
        return " ".join(f"{name}={as_text(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def check_values(config: Any) -> None:
    """Raise ValueError, naming the flag, unless each field has a value of its type, choices and bounds."""
    for each in dataclasses.fields(config):
        choices, value = each.metadata.get("choices"), getattr(config, each.name)
        kind: Any = each.type
        if kind in (bool, int, float, str) and not (is_a(value, kind) or value is each.default is None):
            raise ValueError(f"{flag_name(each.name)} must be of type {kind.__name__}, not {value!r}")
        if choices and value not in (*choices, each.default):
            raise ValueError(f"unknown {flag_name(each.name)} {value!r}; choose from {', '.join(choices)}")
        for words, bound in (each.metadata["bounds"] or USUAL_BOUNDS.get(kind, {})).items():
            wanted = "finite" if bound == math.inf else f"{words} {bound}"
            within = value in (None, each.default) or COMPARISONS[words](value, bound)
            require(within, f"{flag_name(each.name)} must be {wanted}, not {value}")


def _derive(config: Any, **values: Any) -> None:
    """Set the fields of a frozen dataclass that are None."""
    for name, value in values.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. Raises ValueError, naming the flag, if a field is invalid or fields are incompatible."""

    norm: str = option("rmsnorm", "kind of norm", choices=KINDS)
    placement: str = option("pre", "where the norm goes around a sublayer", choices=PLACEMENTS)
    qk_norm: str = option("none", "norm on queries and keys", choices=["none", "head", "full"])
    norm_args: Asked = option({}, "argument of the norm, such as eps=1e-5; may be repeated")
    qk_norm_args: Asked = option({}, "argument of the norm on queries and keys, if not that of --norm-arg")
    placement_args: Asked = option({}, "argument of the placement, such as streams=2; may be repeated")
    qk_norm_after_rope: bool = option(False, "the norm on queries and keys comes after RoPE, not before it")
    attention_bias: bool = option(False, "biases on queries, keys and values, as in Qwen2")
    v_norm: bool = option(False, "RMSNorm without gain on the values of each head")
    inner_norm: bool = option(False, "also a norm inside each sublayer, before its last matrix")
    embedding_norm: str = option(
        "none", "RMSNorm of the embedding, plain or with a gain", choices=["none", "plain", "gain"]
    )
    mlp: str = option("gated", "MLP with a gate, as SwiGLU, or plain", choices=["gated", "plain"])
    activation: str = option("silu", "activation of the MLP", choices=["silu", "gelu_tanh", "relu2"])
    attention_gate: str = option(
        "none",
        "gate on attention's output, from its input: one for each head, or for each element",
        choices=["none", "head", "element"],
    )
    gate_activation: str = option("sigmoid", "activation of --attention-gate", choices=["sigmoid", "softplus"])
    attention_cap: float = option(0.0, "cap attention's scores s at c, as c·tanh(s/c); slower; 0 turns it off")
    logit_cap: float = option(0.0, "cap the logits in the same way; 0 turns it off")
    dim: int = carried(128, "width of the residual stream")
    layers: int = carried(4, "number of blocks", bounds={"at least": 1, "at most": MAX_LAYERS})
    heads: int = carried(2, "number of attention heads")
    kv_heads: int = carried(None, "number of key/value heads, for grouped-query attention (default: --heads)")
    head_dim: int = carried(None, "features per head (default: --dim / --heads)")
    hidden_dim: int = carried(
        None, "width of the MLP (default: 8/3 of --dim, rounded up to a multiple of 32; with --mlp plain, 4 of --dim)"
    )
    context: int = carried(256, "maximum sequence length in tokens")
    vocab_size: int = carried(2048, "number of token ids; always 257 with --tokenizer bytes")
    trained_context: int = carried(None, "")  # the context of --init-from, if it was longer
    model_type: str = carried("", "")  # Hugging Face's for --init-from, if a model like it is saved as another
    rope_theta: float = carried(10000.0, "base of the rotary frequencies", bounds=POSITIVE)
    rope_scaling: dict[str, float] = option(
        {}, f"Llama 3's scaling of RoPE; needs all of {', '.join(ROPE_SCALING)}, one per flag", "carried"
    )
    rotary_fraction: float = option(1.0, "fraction of each head's features that RoPE rotates, the first ones")
    tie_embeddings: bool = carried(True, "use the embedding as the output head")
    scaled_embedding: bool = option(False, "multiply the embedding by a learned scalar, initially sqrt(--dim) (DyT)")
    embedding_scale: float | str = option(1.0, "multiply the embedding by this constant; sqrt is that of --dim (Gemma)")
    z_loss: float = option(0.0, "also minimize this times the mean square of log Σ exp(logits)", export="training")
    dropout: float = option(0.0, "dropout probability in training, for small corpora", "training", FRACTION)
    init: str = option(
        None,
        "initial weights: N(0, 0.02²) for normal, N(0, 2/(inputs + outputs)) for xavier (default: normal; xavier for "
        "--placement deepnorm)",
        choices=["normal", "xavier"],
        export="training",
    )
    depth_scaled_init: bool = option(
        None,
        "with --init normal, divide the std of output projections by sqrt(2 layers) (default: by placement)",
        export="training",
    )

    def __post_init__(self) -> None:
        check_values(self)
        require(self.context > 1, "--context must be at least 2, not 1")
        divisible = self.head_dim or self.dim % self.heads == 0
        require(divisible, f"--dim {self.dim} is not divisible by --heads {self.heads}")
        hidden_dim = 4 * self.dim if self.mlp == "plain" else math.ceil(self.dim * 8 / 3 / 32) * 32
        placement, head_dim = PLACEMENTS[self.placement], self.dim // self.heads
        _derive(self, kv_heads=self.heads, head_dim=head_dim, hidden_dim=hidden_dim, init=placement.init)
        _derive(self, depth_scaled_init=placement.depth_scaled and self.init == "normal")
        odd = f"--head-dim {self.head_dim} (by default --dim / --heads) is odd: RoPE rotates pairs of features"
        require(self.head_dim % 2 == 0, odd)
        rotated = self.head_dim * self.rotary_fraction // 1  # StableLM rounds down too
        even = self.rotary_fraction <= 1 and rotated >= 2 and rotated % 2 == 0
        part = f"--rotary-fraction {self.rotary_fraction} of --head-dim {self.head_dim}"
        require(even, f"{part} must be an even number of features, from 2 to all")
        require(self.heads % self.kv_heads == 0, f"--heads {self.heads} is not divisible by --kv-heads {self.kv_heads}")
        if self.embedding_scale == "sqrt":
            object.__setattr__(self, "embedding_scale", math.sqrt(self.dim))
        scale: Any = self.embedding_scale
        positive = is_a(scale, float) and 0 < scale < math.inf
        require(positive, f"--embedding-scale must be a positive number, not {scale}")
        if scaling := self.rope_scaling:
            valid = (
                scaling.keys() == set(ROPE_SCALING)
                and all(is_a(value, float) and 0 < value < math.inf for value in scaling.values())
                and scaling["low_freq_factor"] < scaling["high_freq_factor"]
            )
            require(valid, f"--rope-scaling takes all of {', '.join(ROPE_SCALING)}: positive numbers, low below high")
        qk_norm = self.qk_norm != "none"
        free = qk_norm and not placement.own_norm
        require(free or not self.qk_norm_after_rope, "--qk-norm-after-rope needs --qk-norm, and not --placement ngpt")
        normed = qk_norm or placement.qkv_norm
        require(normed or not self.qk_norm_args, "--qk-norm-arg needs a norm on queries and keys, as --qk-norm head")
        gated = self.attention_gate != "none" or self.gate_activation == "sigmoid"
        require(gated, f"--gate-activation {self.gate_activation} needs --attention-gate head or element")
        check_placement(self.placement, self.norm, self.norm_args, self.placement_args)
        with torch.device("meta"):  # allocates nothing; only checks the arguments
            build_norm(self.norm, self.dim, **self.norm_args)
            if self.inner_norm:
                for width in (self.heads * self.head_dim, self.hidden_dim):
                    build_norm(self.norm, width, **self.norm_args)
            if self.qk_norm_args:
                kind, norm_args = self.head_norm("query")
                build_norm(kind, self.head_dim, **norm_args)
            if self.placement_args:
                make_norm = partial(build_norm, self.norm, self.dim, **self.norm_args)
                make_matrix = lambda inputs, outputs, role: torch.nn.Linear(inputs, outputs)  # noqa: E731
                site = Site("mlp", 0, self.layers, self.dim, make_norm, make_matrix)
                placement.connection(site, **self.placement_args)  # checks their values

    @property
    def eps(self) -> Asked:
        """The argument eps, if one was given, for norms that are RMSNorm whatever the model's norm is."""
        return {name: value for name, value in self.norm_args.items() if name == "eps"}

    def head_norm(self, site: str) -> tuple[str, Asked]:
        """Kind and arguments of the norm on the heads at `site`: RMSNorm if the model's does not support single heads.

        The arguments of the norm on queries and keys come after those of the model's norm.
        """
        kind, norm_args = (self.norm, self.norm_args) if TRAITS[self.norm].per_head else ("rmsnorm", {})
        return kind, norm_args if site == "value" else norm_args | self.qk_norm_args


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained, on what data, and where the run is stored. Raises ValueError like `ModelConfig`."""

    data: list[str] = option(
        ["python"],
        "python, shakespeare, or paths: text, .jsonl (also .gz), .parquet, folders, or one with train.bin and val.bin",
    )
    val_data: list[str] = option([], "validation text, named like --data (default: a tenth of --data is held out)")
    text_column: str = option("text", "key or column of the text in JSON lines and .parquet files", metavar="NAME")
    tokenizer: str = option("sentencepiece", "sentencepiece, bytes, or a directory with one", metavar="KIND|DIR")
    init_from: str = option(
        "",
        "fine-tune: take weights, model and tokenizer from this run, checkpoint or Hugging Face directory "
        "(default: random initialization)",
        metavar="DIR",
    )
    steps: int = option(500, "optimizer steps")
    batch_size: int = option(8, "sequences in one optimizer step, over all ranks")
    micro_batch_size: int = option(None, "maximum sequences per forward pass; must divide --batch-size (default: all)")
    lr: float = option(0.015, "peak learning rate; that of tiny with Muon follows --dim and --steps", bounds=POSITIVE)
    vector_lr: float = option(
        1.0, "learning rate of vectors and scalars, which norms and placements own, relative to the embedding's"
    )
    schedule: str = option("linear", "learning rate after the warmup", choices=["linear", "cosine", "wsd", "constant"])
    min_lr: float = option(0.0, "learning rate at which the schedules linear, cosine and wsd end")
    warmup: int = option(None, "steps of linear warmup (default: 5%% of --steps)", bounds=NOT_NEGATIVE)
    weight_decay: float = option(0.1, "weight decay of the matrices in the blocks, and of what --decay-gains names")
    decay_gains: str = option(
        "none",
        "norm gains with weight decay: input of norms before a sublayer or the head, output of norms whose result is, "
        "or is added to, the stream",
        choices=["none", "input", "output", "all"],
    )
    optimizer: str = option(
        "muon",
        "adamw, or muon for the matrices in the blocks and the last map of mhc, and AdamW (at twice --lr) for the rest",
        choices=["muon", "adamw"],
    )
    momentum: float = option(0.85, "Muon's momentum; use about 0.95 for longer runs", bounds=FRACTION)
    clip: float = option(1.0, "maximum norm of the gradient; 0 turns clipping off")
    seed: int = option(0, "seed of initial weights, batches and dropout", bounds={"at least": 0, "below": 2**63})
    order: str = option("random", "random windows, or adjacent ones, each once an epoch", choices=["random", "epochs"])
    device: str = option("auto", DEVICES, metavar="DEVICE")
    dtype: str = option("auto", "dtype of matmuls; auto is bfloat16 or float16 if fast, else float32", choices=DTYPES)
    tf32: bool = option(False, "allow TF32 in float32 matrix products on a GPU: faster, with 10 bits of mantissa")
    deterministic: bool = option(False, "deterministic kernels: slower, but a resumed run on CUDA has the same bits")
    recompute: bool = option(False, "gradient checkpointing: less memory, more time")
    compile: bool = option(None, "use torch.compile (default: in training, if the run is long enough to gain from it)")
    shard: bool = option(False, "with torchrun, split every weight over the ranks (FSDP2) instead of copying it (DDP)")
    eval_every: int = option(250, "steps between evaluations; also after the last step")
    eval_tokens: int = option(1 << 17, "validation tokens per evaluation, in evenly spaced windows; fewer are faster")
    save_every: int = option(250, "steps between checkpoints; also after the last step")
    save_minutes: float = option(0.0, "also save a checkpoint this many minutes after the last one; 0 is off")
    max_minutes: float = option(0.0, "after this many minutes of training, save and stop as at a SIGTERM; 0 is off")
    keep: int = option(2, "number of newest checkpoints to keep")
    watch: int = option(
        0, "steps between rows in watch.jsonl; also the first and the last step; 0 is off", bounds=NOT_NEGATIVE
    )
    log: str = option("none", "also log to this tracker; needs its package", choices=["none", "tensorboard", "wandb"])
    out: str = option("", "folder to write to (default: one under runs/)", metavar="DIR")
    cache_dir: str = option(".cache", "directory for prepared corpora", metavar="DIR")

    def __post_init__(self) -> None:
        check_values(self)
        _derive(self, micro_batch_size=self.batch_size, warmup=self.steps // 20)
        require(self.tokenizer != "pretrained" or self.init_from, "--tokenizer pretrained needs --init-from")
        require(self.data and all(self.data), "--data must not be empty; name python, shakespeare, or a path")
        require(all(self.val_data), "--val-data must not be empty; name python, shakespeare, or a path")
        require(self.cache_dir != "", "--cache-dir must not be empty; use . for the current directory")
        require(self.min_lr <= self.lr, f"--min-lr {self.min_lr} is above the learning rate, {self.lr}; --lr sets it")
        longest = int(self.steps * (1 - WSD_DECAY)) if self.schedule == "wsd" else self.steps - 1
        too_long = f"--warmup {self.warmup} is too long: with --steps {self.steps} and --schedule {self.schedule}"
        require(self.warmup <= longest, f"{too_long} it can be at most {longest}")
        micro = f"--micro-batch-size {self.micro_batch_size}"
        divisible = self.batch_size % self.micro_batch_size == 0
        require(divisible, f"--batch-size {self.batch_size} is not divisible by {micro}")


FIELDS = {each.name: each for config in (ModelConfig, TrainConfig) for each in dataclasses.fields(config)}
DEFAULTS: Asked = {
    name: each.default_factory() if callable(each.default_factory) else each.default for name, each in FIELDS.items()
}

# How the best learning rate of Muon changes with a size: the power, and the range where it was measured.
LR_POWERS = {"dim": (-0.95, 96, 256), "steps": (-0.2, 250, 4000)}

# Options that have been removed, at the defaults they had: files of earlier commits have them.
REMOVED: Asked = {"cuda_graph": False}

# What differs from the defaults above, which are the preset `tiny`. `small` sees the default corpus 11 times, so it
# needs dropout: without, it overfits (results/overfitting.md).
LARGE = dict(vocab_size=32000, optimizer="adamw", eval_every=1000, save_every=1000, eval_tokens=1 << 20)
PRESETS: dict[str, Asked] = {
    "tiny": {},
    "small": dict(
        dim=384, layers=6, heads=6, context=512, vocab_size=8192, dropout=0.2,
        batch_size=64, micro_batch_size=64, lr=5e-3, momentum=0.95, steps=1000, eval_tokens=1 << 20,
    ),
    "124m": LARGE | dict(
        dim=768, layers=12, heads=12, context=1024,
        batch_size=480, micro_batch_size=12, lr=6e-4, steps=20000,
    ),
    "1b": LARGE | dict(
        dim=2048, layers=16, heads=32, kv_heads=8, hidden_dim=8192, context=2048, rope_theta=5e5,
        batch_size=512, micro_batch_size=8, lr=4e-4, steps=50000,
    ),
    "7b": LARGE | dict(
        dim=4096, layers=32, heads=32, hidden_dim=11008, context=4096, tie_embeddings=False,
        batch_size=512, micro_batch_size=2, lr=3e-4, steps=100000, shard=True, recompute=True,
    ),
}  # fmt: skip


def configure(
    asked: Asked, found: Asked | None = None, previous: Asked | None = None, memory: float = math.inf
) -> tuple[ModelConfig, TrainConfig]:
    """The configurations that follow from what was `asked`: defaults, preset, recipe, then what was asked.

    found: options that follow from files, which come after the preset. Those of the model and the tokenizer in
        --init-from may only be repeated by what is asked, except context and dropout. Or those of other data files.
    previous: a run.json. What it was resolved to stays, except for what is asked now and what is derived from that. So
        a changed default or another machine does not change a run.
    memory: of the GPU in bytes. The preset's micro-batches are halved below 12 GB, and again below 6 GB.

    What was asked for always wins. A value of the preset gives way if it does not fit: `hidden_dim` to another `dim`,
    `kv_heads` to heads that they do not divide, the vocabulary to bytes, and micro-batches that do not divide the
    batch, or over which a norm would take its statistics. Raises ValueError, naming the flag, for what is incompatible.
    """
    if previous:
        before = previous["asked"]
        then, now = (fields_of(*configure(each, found, memory=memory)) for each in (before, combine(before, asked)))
        changed = {name: now[name] for name in now if name in asked or now[name] != then[name]}
        return configs_of(DEFAULTS | previous["resolved"] | changed)
    preset = dict(PRESETS[asked.get("preset", "tiny")])
    asked = combine(RECIPES[asked.get("recipe", "llama")], asked)
    for limit in (12e9, 6e9):
        if memory < limit and preset.get("micro_batch_size", 1) > 1:
            preset["micro_batch_size"] //= 2
    found = found or {}
    pretrained = found if "context" in found else None
    whole = DEFAULTS | combine(preset, found, asked)
    kept = {
        "hidden_dim": whole["dim"] == preset.get("dim") and whole["mlp"] == "gated",
        "kv_heads": whole["heads"] % preset.get("kv_heads", 1) == 0,
        "vocab_size": whole["tokenizer"] == "sentencepiece",
        "micro_batch_size": whole["batch_size"] % preset.get("micro_batch_size", 1) == 0
        and TRAITS.get(whole["norm"], Traits()).per_token,
    }
    preset = {name: value for name, value in preset.items() if kept.get(name, True)}
    if pretrained:
        if "recipe" in asked:  # what another recipe would set is at its default
            asked = {name: DEFAULTS[name] for options in RECIPES.values() for name in options} | asked
        if asked.get("embedding_scale") == "sqrt":
            asked["embedding_scale"] = math.sqrt(pretrained["dim"])
        asked = {name: value for name, value in asked.items() if pretrained.get(name) != value}  # no repetitions
    given = combine(preset, found, asked)
    if pretrained:
        for name, there in pretrained.items():
            here = given.get(name, DEFAULTS[name])
            asks = f"{flag_name(name)} {as_text(here)} contradicts --init-from, which has {as_text(there) or 'nothing'}"
            require(name in NOT_PRETRAINED or here == there, f"{asks}; leave it out")
        longest = pretrained.get("trained_context") or pretrained["context"]
        given["trained_context"] = longest if longest > given["context"] else None
    elif given.get("tokenizer") == "bytes":
        size = given.setdefault("vocab_size", 257)
        require(size == 257, f"--vocab-size {size}: --tokenizer bytes has 257 ids; leave it out")
    elif given.get("tokenizer") == "none":
        require("vocab_size" in asked, "token files need --tokenizer DIR or bytes, or --vocab-size")
    if not (preset or pretrained or "lr" in asked):
        given["lr"] = carry_lr(DEFAULTS["lr"], DEFAULTS, whole)
    return configs_of(given)


def carry_lr(lr: float, there: Asked, here: Asked) -> float:
    """The learning rate at the sizes `here` that corresponds to `lr` at the sizes `there`. Only Muon's changes."""
    factor = 1.0
    for name, (power, low, high) in LR_POWERS.items() if here["optimizer"] == "muon" else ():
        before, after = (min(max(sizes[name], low), high) for sizes in (there, here))
        factor *= (after / before) ** power
    return lr if factor == 1 else float(f"{lr * factor:.3g}")


def preset_lr(resolved: Asked) -> float:
    """The learning rate that `resolved` was carried from, or its own."""
    lr, preset = resolved["lr"], DEFAULTS["lr"]
    return preset if lr == carry_lr(preset, DEFAULTS, resolved) else lr


def fields_of(model: ModelConfig, training: TrainConfig) -> Asked:
    return dataclasses.asdict(model) | dataclasses.asdict(training)


def combine(*sources: Asked) -> Asked:
    """Later sources override earlier ones. One that sets a norm or placement drops its arguments; others add to them.

    One that turns off `qk_norm` or `attention_gate` drops what earlier ones say about it.
    """
    combined: Asked = {}
    for source in sources:
        before = {name: value for name, value in combined.items() if source.get(NEEDS.get(name, "")) != "none"}
        combined = before | source
        for name in combined.keys() & ARGUMENTS.keys():
            earlier = {} if ARGUMENTS[name] in source else before.get(name, {})
            combined[name] = earlier | source.get(name, {})
    return combined


def configs_of(given: Asked) -> tuple[ModelConfig, TrainConfig]:
    """The configurations with the fields `given`. Other names are ignored."""
    names = (ModelConfig.__annotations__, TrainConfig.__annotations__)
    model, training = ({name: given[name] for name in fields if name in given} for fields in names)
    return ModelConfig(**model), TrainConfig(**training)


def changed_options(before: Asked, model: ModelConfig, training: TrainConfig) -> tuple[list[str], list[str]]:
    """How options differ from those of a run that is resumed: the changes that are allowed, and the others."""
    changed, fixed, then = [], [], fields_of(*configs_of(DEFAULTS | before))  # an earlier version derived fewer options
    for name, here in fields_of(model, training).items():
        there = then[name]
        was = f"{flag_name(name)} {as_text(there) or 'nothing'}"
        if there != here and (name in ModelConfig.__annotations__ or name in FIXED_ON_RESUME):
            fixed.append(f"{was}, not {as_text(here) or 'nothing'}")
        elif there != here:
            changed.append(f"{was} -> {as_text(here) or 'nothing'}")
    return changed, fixed


def check_fields(given: Asked, source: str, others: Asked | None = None) -> None:
    """Raise ValueError, naming `source` and the option, unless all are fields or `others`, and of their types."""
    kinds = {name: each.type for name, each in FIELDS.items()} | (others or {})
    for name, value in given.items():
        require(name in kinds, f"{source}: {name!r} ({as_text(value)}) is not an option of this version")
        kind = kinds[name]
        valid = is_a(value, kind) or (value is None and DEFAULTS[name] is None)
        require(valid, f"{source}: {name} must be of type {getattr(kind, '__name__', kind)}, not {value!r}")
