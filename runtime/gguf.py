"""Export to GGUF, llama.cpp's file format: `python -m runtime.gguf runs/python-rmsnorm-pre model.gguf`.

llama.cpp computes with fixed architectures. A model that none of them expresses is refused. The tokenizer in the file
is of llama.cpp's SentencePiece kind. It gives the same ids for the same text, but for U+2581, which becomes a space.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from config import ModelConfig, Parser, require
from data.tokenizer import SPACE, ByteTokenizer, SentencePieceTokenizer, Tokenizer
from model import Llama
from norms import KINDS
from runtime.checkpoint import open_checkpoint
from runtime.plugins import NotImported
from runtime.process import bad_input, exit_codes

NEEDED = "a GGUF file needs two packages: pip install gguf protobuf"
DTYPES = {"float32": ("F32", "ALL_F32"), "float16": ("F16", "MOSTLY_F16"), "bfloat16": ("BF16", "MOSTLY_BF16")}
FLOAT16_MAX = 65504.0


@dataclasses.dataclass(frozen=True)
class GGUFArchitecture:
    """An architecture of llama.cpp, by the settings that express it here."""

    norm: str = "rmsnorm"
    placement: str = "pre"
    qk_norm: str = "none"
    affine: bool = True  # whether the norms have weights
    neighbors: bool = False  # RoPE rotates features 2i and 2i + 1 of a head, not i and i + D/2
    tied: bool = True  # supports a head that is not in the file, because it is the embedding


GGUF_ARCHITECTURES = {
    "llama": GGUFArchitecture(neighbors=True),
    "qwen3": GGUFArchitecture(qk_norm="head"),
    "olmo2": GGUFArchitecture(placement="reordered", qk_norm="full", tied=False),
    "olmo": GGUFArchitecture("layernorm", affine=False, neighbors=True),
    "stablelm": GGUFArchitecture("layernorm", tied=False),
}

# Our names and llama.cpp's, without the ending .weight or .bias.
GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
    "layers.{}.self_attn.q_norm.norm": "blk.{}.attn_q_norm",  # --qk-norm full
    "layers.{}.self_attn.k_norm.norm": "blk.{}.attn_k_norm",
    "layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "layers.{}.mlp.down_proj": "blk.{}.ffn_down",
    "finish": "output_norm",
    "lm_head": "output",
}
GGUF_NORMS = {
    "pre": ("attn_norm", "ffn_norm"),
    "reordered": ("post_attention_norm", "post_ffw_norm"),
}
# Settings that the file expresses, and settings of training alone. Any other must have its default.
EXPRESSED = {
    "norm", "placement", "qk_norm", "norm_args", "dim", "layers", "heads", "kv_heads", "head_dim", "hidden_dim",
    "context", "vocab_size", "rope_theta", "tie_embeddings", "dropout", "init", "depth_scaled_init",
}  # fmt: skip
EXPRESSED_NORM_ARGS = {"eps", "elementwise_affine", "cast_order"}  # llama.cpp's norms compute in fp32


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m runtime.gguf", description="Export a model to GGUF, llama.cpp's file format.")
    parser.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", help="run directory or one of its checkpoints")
    parser.add_argument("out", metavar="OUT.gguf", type=Path, help="the file to write, which must not exist yet")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=DTYPES,
        help="dtype of the matrices; norms are float32 (default: float32)",
    )
    flags = parser.parse_args(arguments)
    with exit_codes("model"), bad_input():
        require_new(flags.out)  # before the weights are read
        try:
            checkpoint, model, tokenizer = open_checkpoint(flags.checkpoint)
        except NotImported:
            source = flags.checkpoint or "the newest run"
            raise ValueError(f"llama.cpp cannot express the norm or placement of {source}") from None
        export(model, tokenizer, flags.out, flags.dtype)
        size = flags.out.stat().st_size / 1e6
        print(f"{flags.out}: {checkpoint} as {find_architecture(model.config)} in {flags.dtype}, {size:.1f} MB")


def require_new(out: Path) -> None:
    require(not out.exists(), f"{out} exists; name a new file")


def export(model: Llama, tokenizer: Tokenizer, out: str | Path, dtype: str = "float32") -> None:
    """Write `model` and `tokenizer` to the new GGUF file `out`, with matrices in `dtype`.

    Raises ValueError, naming the setting, if llama.cpp has no such architecture or tokenizer, if `out` exists, if a
    weight is too large for `dtype`, and if the packages gguf and protobuf are missing.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError(NEEDED) from None

    out, name = Path(out), find_architecture(model.config)
    require_new(out)
    require(dtype in DTYPES, f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    vocabulary = describe_tokenizer(tokenizer)
    sizes = tokenizer.vocab_size, model.config.vocab_size
    require(sizes[0] == sizes[1], f"the tokenizer has {sizes[0]} ids, but the model has --vocab-size {sizes[1]}")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    writer = gguf.GGUFWriter(part, name)
    try:
        add_settings(writer, model)
        matrices, file_type = DTYPES[dtype]
        writer.add_file_type(gguf.LlamaFileType[file_type])
        add_tokenizer(writer, vocabulary)
        for tensor_name, tensor in convert(model):
            fits = dtype != "float16" or bool((tensor.abs() <= FLOAT16_MAX).all())
            require(fits, f"--dtype float16 cannot hold a value of {tensor_name}; use bfloat16 or float32")
            kind = gguf.GGMLQuantizationType[matrices if tensor.ndim == 2 else "F32"]
            writer.add_tensor(tensor_name, gguf.quantize(tensor.float().cpu().numpy(), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(out)
    finally:
        writer.close()
        part.unlink(missing_ok=True)


# --- the model -------------------------------------------------------------------------------------------------------


def find_architecture(config: ModelConfig) -> str:
    """llama.cpp's name for models like this. Raises ValueError, naming the first setting that it cannot express."""
    left = GGUF_ARCHITECTURES
    for field, flag, value in (
        ("norm", "--norm", config.norm),
        ("placement", "--placement", config.placement),
        ("qk_norm", "--qk-norm", config.qk_norm),
        ("affine", "--norm-arg elementwise_affine", config.norm_args.get("elementwise_affine", True)),
    ):
        choices = dict.fromkeys(str(getattr(architecture, field)).lower() for architecture in left.values())
        before = f" with {', '.join(left)}" if left is not GGUF_ARCHITECTURES else ""
        left = {name: architecture for name, architecture in left.items() if getattr(architecture, field) == value}
        spelled = f"{flag}{'=' if '-arg' in flag else ' '}{str(value).lower()}"
        require(bool(left), f"llama.cpp cannot express {spelled}; it has {' or '.join(choices)}{before}")
    for name, default in dataclasses.asdict(ModelConfig()).items():
        value, flag = getattr(config, name), f"--{name.replace('_', '-')}"
        expressed = name in EXPRESSED or value == default
        require(expressed, f"llama.cpp cannot express {flag}, which is {value}, not {default}")
    defaults = inspect.signature(KINDS[config.norm]).parameters
    for name, value in config.norm_args.items():
        expressed = name in EXPRESSED_NORM_ARGS or value == defaults[name].default
        require(expressed, f"llama.cpp cannot express --norm-arg {name}={str(value).lower()}")
    name = next(iter(left))
    fits = name in ("llama", "qwen3") or config.heads * config.head_dim == config.dim
    require(fits, f"llama.cpp cannot express --head-dim {config.head_dim} with {name}; it has --dim / --heads")
    return name


def convert(model: Llama) -> Iterator[tuple[str, Tensor]]:
    """llama.cpp's name and tensor for every weight of `model`."""
    config = model.config
    architecture = GGUF_ARCHITECTURES[find_architecture(config)]
    sites = zip(("attention_residual", "mlp_residual"), GGUF_NORMS[config.placement], strict=True)
    names = GGUF_NAMES | {f"layers.{{}}.{site}.norm": f"blk.{{}}.{theirs}" for site, theirs in sites}
    for ours, tensor in model.state_dict().items():
        path, _, kind = ours.rpartition(".")
        if path == "lm_head" and config.tie_embeddings and architecture.tied:
            continue
        layer = "".join(re.findall(r"^layers\.(\d+)", path))
        theirs = names[re.sub(r"^layers\.\d+", "layers.{}", path)].format(layer)
        if architecture.neighbors and path.endswith(("q_proj", "k_proj")):
            tensor = pair_neighbors(tensor, config.head_dim)
        yield f"{theirs}.{kind}", tensor


def pair_neighbors(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head: (i, i + D/2) become (2i, 2i + 1). Scores q·k stay, if both are reordered."""
    heads = weight.unflatten(0, (-1, 2, head_dim // 2))  # H 2 D/2 C
    return heads.transpose(1, 2).flatten(0, 2).contiguous()  # H·D C


def add_settings(writer: Any, model: Llama) -> None:
    config, eps = model.config, float(model.finish.eps)  # type: ignore[arg-type]
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.hidden_dim)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    add_eps = writer.add_layer_norm_rms_eps if config.norm == "rmsnorm" else writer.add_layer_norm_eps
    add_eps(eps)
    writer.add_vocab_size(config.vocab_size)


# --- the tokenizer ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as llama.cpp's SentencePiece kind describes it: text, score and type of each id."""

    pieces: list[str]
    scores: list[float]
    types: list[int]  # as in SentencePiece: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
    unknown: int
    begin: int
    end: int


NORMAL, CONTROL, BYTE = 1, 3, 6


def describe_tokenizer(tokenizer: Tokenizer) -> Vocabulary:
    """`tokenizer` for llama.cpp. Raises ValueError if it would encode text differently."""
    if isinstance(tokenizer, ByteTokenizer):
        # llama.cpp turns every space into U+2581 before it looks for pieces, so that is the piece of byte 32.
        pieces = [SPACE if byte == 32 else f"<0x{byte:02X}>" for byte in range(256)] + ["</s>"]
        types = [NORMAL if byte == 32 else BYTE for byte in range(256)] + [CONTROL]
        end = tokenizer.end_of_document
        return Vocabulary(pieces, [0.0] * len(pieces), types, unknown=end, begin=end, end=end)
    refusal = (
        "a GGUF file can have a tokenizer that train.py has trained, of --tokenizer sentencepiece or bytes, no other"
    )
    require(isinstance(tokenizer, SentencePieceTokenizer), refusal)
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    except ImportError:
        raise ValueError(NEEDED) from None
    model = ModelProto.FromString(tokenizer.model)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    changes_text = normalizer.precompiled_charsmap or normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces
    require(trainer.model_type == trainer.BPE and not changes_text, refusal)
    return Vocabulary(
        pieces=[piece.piece for piece in model.pieces],
        scores=[piece.score for piece in model.pieces],
        types=[piece.type for piece in model.pieces],
        unknown=trainer.unk_id,
        begin=trainer.bos_id,
        end=trainer.eos_id,
    )


def add_tokenizer(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(vocabulary.pieces)
    writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    writer.add_unk_token_id(vocabulary.unknown)
    writer.add_bos_token_id(vocabulary.begin)
    writer.add_eos_token_id(vocabulary.end)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


if __name__ == "__main__":
    main()
