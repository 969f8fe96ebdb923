"""Every knob, declared once: a dataclass field with its help, from which the flags and the checks follow."""

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import torch

from norms import KINDS, TRAITS, build_norm, is_a, parse_norm_args
from norms.placement import PLACEMENTS, check_placement

LARGEST = 2**31 - 1  # of any size; C++ and the file formats count in such numbers
MOST_WEIGHTS = 10**12  # in fp32 alone 4 TB, which no single device has


def knob(default: Any, help: str, **argument: Any) -> Any:
    """A dataclass field that is also a flag; `argument` goes to argparse as it is."""
    metadata = {"help": help, **argument}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def _dashed(name: str) -> str:
    """The flag of a field, without its two leading dashes."""
    return {"norm_args": "norm-arg"}.get(name, name.replace("_", "-"))


def _check_choices(config: Any) -> None:
    for knob in dataclasses.fields(config):
        choices, value = knob.metadata.get("choices"), getattr(config, knob.name)
        if choices and value not in choices:
            raise ValueError(f"unknown --{_dashed(knob.name)} {value!r}; choose from {', '.join(choices)}")


def check_sizes(config: Any, *names: str) -> None:
    """Raise ValueError, naming the flag, unless each field is left open or from 1 to `LARGEST`."""
    for name in names:
        value, flag = getattr(config, name), f"--{_dashed(name)}"
        require(value is None or value >= 1, f"{flag} must be at least 1, not {value}")
        require(value is None or value <= LARGEST, f"{flag} must be at most {LARGEST}, not {value}")


def require(condition: bool, complaint: str) -> None:
    """Raise ValueError with `complaint` unless `condition` holds."""
    if not condition:
        raise ValueError(complaint)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model: its architecture and its initial weights follow from these fields and a seed.

    Raises ValueError, in one line that names the flag, where the fields do not go together.
    """

    norm: str = knob("rmsnorm", "kind of norm", choices=KINDS)
    placement: str = knob("pre", "where the norm stands around a sublayer", choices=PLACEMENTS)
    qk_norm: str = knob("none", "norm on queries and keys", choices=["none", "head", "full"])
    norm_args: dict[str, Any] = knob({}, "an argument of the norm, such as eps=1e-5; may be repeated")
    dim: int = knob(256, "width of the residual stream")
    layers: int = knob(4, "number of blocks")
    heads: int = knob(4, "attention heads")
    kv_heads: int = knob(None, "heads of keys and values, shared among --heads (default: as many)")
    hidden_dim: int = knob(None, "width inside the MLP (default: 8/3 of --dim, rounded up to a multiple of 32)")
    context: int = knob(256, "longest sequence in tokens")
    vocab_size: int = knob(2048, "number of token ids; the byte tokenizer has 257, whatever is asked for")
    rope_theta: float = knob(10000.0, "base of the rotary embedding's wavelengths")
    tie_embeddings: bool = knob(True, "let the output head be the embedding")
    dropout: float = knob(0.0, "share of activations dropped in training, for small corpora")
    init: str = knob(
        None,
        "draw weights from N(0, 0.02), or by Xavier's rule (default: normal; xavier for --placement deepnorm)",
        choices=["normal", "xavier"],
    )
    depth_scaled_init: bool = knob(
        True, "start what writes into the stream at 1/sqrt(2 layers) of its size; --init normal only"
    )

    def __post_init__(self) -> None:
        if self.init is None and self.placement in PLACEMENTS:
            object.__setattr__(self, "init", PLACEMENTS[self.placement].init)
        _check_choices(self)
        check_sizes(self, "dim", "layers", "heads", "kv_heads", "hidden_dim", "context", "vocab_size")
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.hidden_dim is None:
            object.__setattr__(self, "hidden_dim", math.ceil(self.dim * 8 / 3 / 32) * 32)
        require(self.dim % self.heads == 0, f"--dim {self.dim} is not divisible by --heads {self.heads}")
        require(self.head_dim % 2 == 0, f"--dim {self.dim} / --heads {self.heads} is odd: RoPE turns pairs of features")
        require(self.heads % self.kv_heads == 0, f"--heads {self.heads} is not divisible by --kv-heads {self.kv_heads}")
        require(0 < self.rope_theta < math.inf, f"--rope-theta must be a positive number, not {self.rope_theta}")
        require(0 <= self.dropout < 1, f"--dropout must be at least 0 and below 1, not {self.dropout}")
        require(
            self.weights <= MOST_WEIGHTS,
            f"a model of {self.weights:.1e} weights is too large to train; "
            "choose a smaller --dim, --hidden-dim, --layers or --vocab-size",
        )
        check_placement(self.placement, self.layers, TRAITS[self.norm].identity)
        with torch.device("meta"):  # a trial, which refuses arguments that it cannot use and takes no memory
            build_norm(self.norm, self.dim, **self.norm_args)

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def weights(self) -> int:
        """Weights in all matrices, which is all but the norms' gains and biases."""
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        tables = 1 if self.tie_embeddings else 2
        return self.layers * (attention + 3 * self.dim * self.hidden_dim) + tables * self.vocab_size * self.dim


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained, on what, and where the run goes. Raises ValueError like `ModelConfig`."""

    data: list[str] = knob(["python"], "python, shakespeare, or paths: text file, folder, .jsonl, any gzipped")
    tokenizer: str = knob("sentencepiece", "text to ids", choices=["sentencepiece", "bytes"])
    steps: int = knob(480, "optimizer steps")
    batch_size: int = knob(16, "sequences in one optimizer step")
    micro_batch_size: int = knob(
        None, "sequences that go through the model at once; divides --batch-size (default: all)"
    )
    lr: float = knob(0.01, "peak learning rate")
    schedule: str = knob("linear", "learning rate after the warm-up", choices=["linear", "cosine", "wsd", "constant"])
    warmup: int = knob(None, "steps of linear warm-up (default: a twentieth of --steps)")
    weight_decay: float = knob(0.1, "decay of matrices; never of gains, biases and embeddings")
    optimizer: str = knob("muon", "adamw for everything, or muon for the blocks' matrices", choices=["muon", "adamw"])
    momentum: float = knob(0.9, "of Muon: share of its running mean that stays at each step; more in longer runs")
    clip: float = knob(1.0, "largest norm of the whole gradient; 0 leaves it as it is")
    seed: int = knob(0, "of the initial draws, the batches and the dropout")
    device: str = knob("auto", "where to compute", choices=["auto", "cpu", "cuda", "mps"])
    dtype: str = knob("auto", "of matrix products", choices=["auto", "float32", "bfloat16", "float16"])
    recompute: bool = knob(False, "compute each block again for its gradient: slower, in less memory")
    compile: bool = knob(None, "torch.compile the model (default: where it pays within the run)")
    eval_every: int = knob(120, "steps between evaluations; the last step always has one")
    save_every: int = knob(240, "steps between checkpoints; the last step always has one")
    keep: int = knob(2, "checkpoints to keep")
    log: str = knob("none", "log to this as well", choices=["none", "tensorboard", "wandb"])
    out: str = knob("", "folder of the run (default: a new one under runs/)", metavar="DIR")
    cache_dir: str = knob(".cache", "where prepared corpora are kept", metavar="DIR")

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.micro_batch_size is None:
            object.__setattr__(self, "micro_batch_size", self.batch_size)
        if self.warmup is None:
            object.__setattr__(self, "warmup", self.steps // 20)
        check_sizes(self, "steps", "batch_size", "micro_batch_size", "eval_every", "save_every", "keep")
        require(bool(self.data) and all(self.data), "--data must not be empty; name python, shakespeare, or a path")
        require(self.cache_dir != "", "--cache-dir must not be empty; . is the current folder")
        for name in ("warmup", "weight_decay", "clip", "seed"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"--{_dashed(name)} must be a number from 0 up, not {value}")
        require(self.seed < 2**63, f"--seed must be below 2**63, not {self.seed}")
        require(0 < self.lr < math.inf, f"--lr must be a positive number, not {self.lr}")
        require(0 <= self.momentum < 1, f"--momentum must be at least 0 and below 1, not {self.momentum}")
        require(
            self.batch_size % self.micro_batch_size == 0,
            f"--batch-size {self.batch_size} is not divisible by --micro-batch-size {self.micro_batch_size}",
        )


FIELDS = {field.name: field for config in (ModelConfig, TrainConfig) for field in dataclasses.fields(config)}

# What differs from the defaults above, which are the preset `tiny`.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": dict(
        dim=384, layers=6, heads=6, context=512, vocab_size=8192, batch_size=64, lr=5e-3, momentum=0.95,
        steps=3000, eval_every=500, save_every=500,
    ),
    "124m": dict(
        dim=768, layers=12, heads=12, hidden_dim=2048, context=1024, vocab_size=32000,
        batch_size=480, micro_batch_size=12, lr=6e-4, optimizer="adamw", steps=20000, eval_every=1000, save_every=1000,
    ),
    "1b": dict(
        dim=2048, layers=16, heads=32, kv_heads=8, hidden_dim=8192, context=2048, vocab_size=32000, rope_theta=5e5,
        batch_size=512, micro_batch_size=8, lr=4e-4, optimizer="adamw", steps=50000, eval_every=1000, save_every=1000,
    ),
}  # fmt: skip


# What follows from what: a flag that changes the second takes back what preset or file say of the first.
# A micro-batch follows the batch only where it would no longer divide it.
FOLLOWS = {
    "hidden_dim": "dim",
    "kv_heads": "heads",
    "norm_args": "norm",
    "init": "placement",
    "vocab_size": "tokenizer",
    "warmup": "steps",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line and exits with 2."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--preset`, `--config` and a flag for every field of both configurations."""
    parser.add_argument("--preset", choices=PRESETS, help="sizes to start from (default: tiny on a CPU, else small)")
    parser.add_argument("--config", metavar="RUN.JSON", help="an earlier run's configuration to start from")
    add_knobs(parser.add_argument_group("model"), ModelConfig)
    add_knobs(parser.add_argument_group("training"), TrainConfig)


def add_knobs(parser: argparse._ActionsContainer, config: type) -> None:
    """Add a flag for every field of the dataclass `config` to a parser, or to a group of one."""
    hints = get_type_hints(config)
    for knob in dataclasses.fields(config):
        parser.add_argument(f"--{_dashed(knob.name)}", **_argument(knob, hints[knob.name]))


def _argument(knob: dataclasses.Field, kind: Any) -> dict[str, Any]:
    """What argparse is told of a field; a flag that is not given leaves nothing, so that presets show through."""
    argument = {"dest": knob.name, "default": argparse.SUPPRESS, **knob.metadata}
    default = knob.default if knob.default_factory is dataclasses.MISSING else " ".join(knob.default_factory())
    if default not in (None, ""):
        argument["help"] += f" (default: {default})"
    if kind is bool:
        return argument | {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is dict:
        return argument | {"action": "append", "metavar": "KEY=VALUE"}
    if get_origin(kind) is list:
        return argument | {"nargs": "+", "metavar": "NAME|PATH"}
    return {"type": kind, "metavar": None if "choices" in knob.metadata else kind.__name__.upper()} | argument


def read_run(path: Path) -> dict[str, Any]:
    """The fields of both configurations from a `run.json`; those that an earlier version lacked are not there.

    Raises ValueError, naming file and field, if it is missing, something else, or holds what this version does not.
    """
    try:
        run = json.loads(path.read_text())
        given = {**run["model"], **run["training"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"--config {path}: not a readable run.json") from None
    hints = get_type_hints(ModelConfig) | get_type_hints(TrainConfig)
    for name, value in given.items():
        require(name in FIELDS, f"--config {path}: {name!r} is no field of this version")
        open_too = value is None and FIELDS[name].default is None
        kind = hints[name].__name__ if isinstance(hints[name], type) else hints[name]
        require(open_too or is_a(value, hints[name]), f"--config {path}: {name} must be of type {kind}, not {value!r}")
    return given


def configs_from(flags: argparse.Namespace, device: str) -> tuple[ModelConfig, TrainConfig]:
    """Put together defaults, then preset (`small` on an accelerator) or `--config` file, then flags.

    Raises ValueError for a file that is not a run's configuration and for values that do not fit.
    """
    require(not (flags.preset and flags.config), "--preset or --config, not both: each says all that flags leave open")
    if flags.config:
        given = read_run(Path(flags.config))
    else:
        given = PRESETS[flags.preset or ("tiny" if device == "cpu" else "small")]
    by_flag = {name: value for name, value in vars(flags).items() if name in FIELDS}
    changed = {name for name in by_flag if by_flag[name] != given.get(name, FIELDS[name].default)}
    given = {name: value for name, value in given.items() if FOLLOWS.get(name) not in changed} | by_flag
    micro = given.get("micro_batch_size") or 1
    if "batch_size" in changed and "micro_batch_size" not in by_flag and given["batch_size"] % micro:
        del given["micro_batch_size"]
    if isinstance(given.get("norm_args"), list):
        given["norm_args"] = parse_norm_args(given.get("norm", ModelConfig.norm), given["norm_args"])
    if given.get("tokenizer") == "bytes":
        given["vocab_size"] = 257
    in_model = get_type_hints(ModelConfig)
    return (
        ModelConfig(**{name: value for name, value in given.items() if name in in_model}),
        TrainConfig(**{name: value for name, value in given.items() if name not in in_model}),
    )
