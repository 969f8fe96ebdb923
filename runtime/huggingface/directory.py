"""A model in a directory that `transformers` opens: config.json, weights, tokenizer.

config.json is Hugging Face's, with our configuration under a key of its own. A model that no architecture expresses has
a model_type of ours, which `transformers` refuses, and the reason.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import ModelConfig, check_fields, require
from data.pretrained import PretrainedTokenizer, load_tokenizer
from data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from files import is_a, load_json
from model import Llama
from runtime.huggingface.architectures import OWN, OWN_TYPE, Inexpressible, from_theirs, to_theirs
from runtime.huggingface.names import hugging_face_name
from runtime.huggingface.weights import WEIGHTS, StoredTensor, save_tensors, stored_tensors, weight_files
from runtime.plugins import NotImported, import_records, warn_of_imports

CONFIG = "config.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TENSORS_PER_LAYER = 7  # at least: its matrices
MAX_ROPE_BYTES = 1 << 25  # of the table of rotary positions, unless the weights are larger
TOKENIZERS = (ByteTokenizer.kind, SentencePieceTokenizer.kind, PretrainedTokenizer.kind)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_model(directory: Path, config: ModelConfig, state: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write a model's `stored_state` with its configuration and tokenizer."""
    dtype = str(state["embed_tokens.weight"].dtype).removeprefix("torch.")
    end = tokenizer.end_of_document  # which also starts a text without a prompt
    described: dict[str, Any] = {"dtype": dtype, "bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    try:
        described |= to_theirs(config)
    except Inexpressible as reason:
        described |= {"model_type": OWN_TYPE, "not_in_transformers": str(reason)}
    described[OWN] = {"model": asdict(config), "tokenizer": tokenizer.kind, "imports": import_records()}
    (directory / CONFIG).write_text(json.dumps(described, indent=1), "utf-8")
    save_tensors({hugging_face_name(name, config): tensor for name, tensor in state.items()}, directory / WEIGHTS)
    tokenizer.save(directory)


def stored_state(model: Llama) -> dict[str, Tensor]:
    """The state that a file holds, under our names: a tied head is stored as the embedding only."""
    state = model.state_dict()
    if model.config.tie_embeddings:
        del state["lm_head.weight"]
    return state


# --- reading ---------------------------------------------------------------------------------------------------------


def read_config(directory: Path) -> tuple[ModelConfig, str | None]:
    """The configuration, and the kind of our tokenizer if it is known.

    Raises ValueError, naming file and field, for what is damaged or not supported.
    """
    described = _read_json(directory / CONFIG)
    try:
        if _is_old(described):
            described = {"model_type": OWN_TYPE, OWN: described}
        own: Any = described.get(OWN)
        if own or described.get("model_type") == OWN_TYPE:
            valid = is_a(own, dict) and is_a(own.get("model"), dict) and is_a(own.get("tokenizer"), str)
            require(valid, f"{OWN} is damaged")
            kinds = ", ".join(TOKENIZERS)
            require(own["tokenizer"] in TOKENIZERS, f"the tokenizer {own['tokenizer']!r} is unknown; {kinds} are known")
            check_fields(own["model"], OWN)
            warn_of_imports(own, directory / CONFIG)
        if described.get("model_type") == OWN_TYPE:
            return ModelConfig(**own["model"]), own["tokenizer"]
        config, kind = from_theirs(described), None
        if own:
            ours, kind = ModelConfig(**own["model"]), own["tokenizer"]
            if from_theirs(to_theirs(ours)) == config:  # otherwise their fields were changed, and say what is stored
                config = ours
        return config, kind
    except NotImported:
        raise
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"{directory / CONFIG} does not describe a model of this version: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = load_json(path)
    except (OSError, ValueError):
        content = None
    require(isinstance(content, dict), f"{path} is missing or damaged")
    return content


def _is_old(described: dict[str, Any]) -> bool:
    """Whether this is the config.json of an earlier version, whose weights have our names."""
    return "model" in described and "model_type" not in described


def read_model(directory: Path, config: ModelConfig | None = None, dtype: torch.dtype | None = None) -> Llama:
    """The model on the CPU, in the dtype of the files or in `dtype`. Memory peaks a tensor above that of the weights.

    `config` may differ from the stored one in what has no weights, such as the context. Raises ValueError, naming the
    file, before anything is allocated if weights and configuration do not fit together.
    """
    model, weights = open_model(directory, config)
    state = {}
    for name, stored in weights.items():
        tensor = stored.read()
        state[name] = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
    if model.config.tie_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    if model.config.tie_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model


def check_context(config: ModelConfig, weight_bytes: int, where: str) -> None:
    """Raise ValueError if the table of rotary positions takes more memory than is worth reserving for these weights.

    The message begins with `where`, what names the context.
    """
    table = 4 * config.context * config.head_dim
    require(
        table <= max(MAX_ROPE_BYTES, weight_bytes),
        f"{where} {config.context}, for which RoPE alone needs {table / 1e9:.2f} GB, more than the weights; "
        "make it smaller",
    )


def open_model(directory: Path, config: ModelConfig | None = None) -> tuple[Llama, dict[str, StoredTensor]]:
    """The model without storage, and the stored tensor of each of its weights. See `read_model`."""
    config = config or read_config(directory)[0]
    tensors = len(stored_tensors(directory))
    weight_bytes = sum(path.stat().st_size for path in weight_files(directory))
    check_context(config, weight_bytes, f"{directory / CONFIG} has a context of")
    require(
        config.layers * TENSORS_PER_LAYER <= tensors,
        f"{directory / CONFIG} describes {config.layers} layers, and the weights are {tensors} tensors",
    )
    with torch.device("meta"):
        model = Llama(config)
    return model, match_weights(directory, model)


def match_weights(directory: Path, model: Llama) -> dict[str, StoredTensor]:
    """The stored tensor of each name in `stored_state(model)`, none of which is read yet.

    Raises ValueError, naming the differences, if the files are of another model.
    """
    found, expected = stored_tensors(directory), stored_state(model)
    old = _is_old(_read_json(directory / CONFIG))
    names = {name if old else hugging_face_name(name, model.config): name for name in expected}
    for name in [name for name in found if re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name)]:
        del found[name]  # in files of transformers before 4.32; derived from the configuration
    if model.config.tie_embeddings and "lm_head.weight" in found:
        head = found.pop("lm_head.weight")
        embedding = found.get("model.embed_tokens.weight")
        same = embedding and embedding.shape == head.shape and torch.equal(embedding.read(), head.read())
        require(bool(same), f"{head.path}: lm_head.weight is not the embedding, but tie_word_embeddings is true")
    common = names.keys() & found.keys()
    problems = {
        "lacks": names.keys() - found.keys(),
        "has an unknown": found.keys() - names.keys(),
        "has another shape of": {name for name in common if found[name].shape != expected[names[name]].shape},
        "has another dtype than F32, BF16 or F16 of": {
            name for name in common if expected[names[name]].is_floating_point() and found[name].dtype not in DTYPES
        },
    }
    if any(problems.values()):
        listed = "; ".join(f"{problem} {_abridged(found)}" for problem, found in problems.items() if found)
        raise ValueError(f"{directory / WEIGHTS} is of another model: it {listed}")
    return {ours: found[name] for name, ours in names.items()}


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a directory. Raises ValueError, in one line, if it is missing, damaged or of another model."""
    config, kind = read_config(directory)
    if kind is None or (kind == SentencePieceTokenizer.kind and not (directory / "tokenizer.model").is_file()):
        kind = PretrainedTokenizer.kind  # transformers saves a tokenizer.json in its place
    tokenizer = load_tokenizer(kind, directory)
    padding = config.vocab_size // 32 if kind == PretrainedTokenizer.kind else 0  # some round the vocabulary up
    require(
        config.vocab_size - padding <= tokenizer.vocab_size <= config.vocab_size,
        f"{directory}: the tokenizer has {tokenizer.vocab_size} ids and the model {config.vocab_size}",
    )
    return tokenizer


def _abridged(names: Iterable[str]) -> str:
    """The first of `names` and how many more, for one line."""
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
