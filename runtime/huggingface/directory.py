"""A model in a directory that `transformers` opens: config.json, weights, tokenizer.

config.json is Hugging Face's, with our configuration under a key of its own. A model that no architecture expresses has
a model_type of ours, which `transformers` refuses, and the reason.
"""

import json
import re
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from config import ModelConfig, check_fields
from data.pretrained import read_directory, read_files
from data.tokenizer import TOKENIZER_KINDS, ByteTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer
from files import Json, digest, is_a, read_json, require, warn
from machine import distributed
from model import Llama
from runtime.huggingface.architectures import OWN, OWN_TYPE, from_theirs, layout, to_theirs
from runtime.huggingface.weights import KNOWN, WEIGHTS, Layout, StoredTensor, save_tensors, stored_tensors, weight_files
from runtime.plugins import import_records, warn_of_imports

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FORMAT = 1  # version of our part of config.json and of the names of weights; increase it whenever they change
STORED_DTYPES = ("F32", "BF16", "F16")
MAX_ROPE_BYTES = 1 << 25  # maximum for the table of rotary positions, unless the weights are larger
SETTING = bool | int | float | str | partial
OF_TRAINING = {"training", "recompute", "p"}  # attributes of modules that change nothing afterwards; p is of dropout


def write_model(directory: Path, model: Llama, state: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write a model's `stored_state` with its configuration and tokenizer. A line says if its modules were changed."""
    config = model.config
    dtype = str(state["embed_tokens.weight"].dtype).removeprefix("torch.")
    end = tokenizer.end_of_document  # it also starts a text without a prompt
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    stored = Layout(config)
    described = {"dtype": dtype} | (ids if tokenizer.token_ids is None else tokenizer.token_ids)
    edited = edited_module(model)
    if edited:
        warn(f"warning: {edited} is not as model.py makes it, and is saved without the change")
    try:
        imported = [record["file"] for record in import_records()]
        require(not imported, f"{', '.join(imported[:1])} was imported, and may change what is computed")
        require(not edited, f"{edited} is not as model.py makes it")
        theirs = to_theirs(config)
        unknown = [name for name in stored.places(state) if not re.fullmatch(KNOWN, name)]
        require(not unknown, f"no Hugging Face architecture has {', '.join(unknown[:1])}")
        described |= theirs
        stored = layout(theirs, config)
    except ValueError as reason:
        described |= {"model_type": OWN_TYPE, "not_in_transformers": str(reason)}
    own = {"format": FORMAT, "model": asdict(config), "tokenizer": tokenizer.kind, "imports": import_records()}
    own["sha256"] = digest(described | {OWN: own})
    (directory / CONFIG).write_text(json.dumps(described | {OWN: own}, indent=1), "utf-8")
    tensors = {name: stored.to_theirs(ours, state) for name, ours in stored.places(state).items()}
    save_tensors(tensors, directory / WEIGHTS)
    tokenizer.save(directory)
    if tokenizer.generation:
        (directory / GENERATION).write_text(json.dumps(tokenizer.generation, indent=1), "utf-8")


def edited_module(model: Llama) -> str:
    """The first module that does not compute what model.py's own does for this configuration, if there is one."""
    with torch.device("meta"):
        own = dict(Llama(model.config).named_modules())
    modules = dict(model.named_modules())
    for name in modules | own:
        if not (name in modules and name in own and computes_as(modules[name], own[name])):
            return name or "the model"
    return ""


def computes_as(module: nn.Module, own: nn.Module) -> bool:
    """Whether a module has the class and the settings of model.py's `own`."""
    kind = next(each for each in type(module).__mro__ if not each.__name__.startswith("FSDP"))  # which sharding adds
    now, made_with = vars(module), vars(own)
    settings = [name for name, value in made_with.items() if hasattr(value, "__name__") or isinstance(value, SETTING)]
    same = all(str(now.get(name)) == str(made_with[name]) for name in settings if name not in OF_TRAINING)
    return kind is type(own) and same and not now.keys() & {"forward", "hidden", "logits"}  # sharding has others


def stored_state(model: Llama) -> dict[str, Tensor]:
    """The state that a file holds, under our names: without a tied head, which must still be the embedding.

    Raises ValueError, naming the tensor, also if two other names share a tensor.
    """
    state, names = model.state_dict(), dict[int, str]()
    if model.config.tie_embeddings:
        advice = "call tie_weights() to drop it, or make a Llama(tie_embeddings=False)"
        tied = model.lm_head.weight is model.embed_tokens.weight
        require(tied, f"lm_head.weight is no longer the embedding, but tie_embeddings is true; {advice}")
        del state["lm_head.weight"]
    for name, tensor in state.items():
        memory = distributed.local(tensor).data_ptr()
        first = names.setdefault(memory, name) if memory else name  # a tensor without values has none
        require(first == name, f"{name} and {first} are the same tensor, and would be two when they are loaded")
    return state


@dataclass(frozen=True)
class StoredModel:
    """A model in a directory, and what its config.json says. `tokenizer` is the kind of ours, if it is known."""

    directory: Path
    config: ModelConfig
    tokenizer: str | None
    described: Json


def read_config(directory: Path) -> StoredModel:
    """The model in a directory. A ValueError names file and field."""
    path = directory / CONFIG
    described = read_json(path, dict)
    try:
        own = described.get(OWN)
        if own is None:
            return StoredModel(directory, from_theirs(described), None, described)
        version = own["format"]
        require(version == FORMAT, f"another version of normal-llama wrote it: its format is {version!r}, not {FORMAT}")
        check_fields(own["model"], OWN)
        warn_of_imports(own["imports"], added=True)
        config = ModelConfig(**own["model"])
        if own.pop("sha256", None) != digest(described) and described.get("model_type") != OWN_TYPE:
            theirs = from_theirs(described)
            if theirs != from_theirs(to_theirs(config)):
                config = theirs  # others have changed their fields, which say what is stored
        return StoredModel(directory, config, own["tokenizer"], described)
    except KeyError as error:
        raise ValueError(f"{path}: {OWN} lacks {error}") from None
    except (AttributeError, TypeError, ValueError) as error:  # also of values of other types
        raise ValueError(f"{path}: {error}") from None


def read_model(source: StoredModel, config: ModelConfig | None = None) -> Llama:
    """The model on the CPU, in the dtype of the files. Memory peaks one tensor above the weights' size.

    `config` may differ from the stored one in what has no weights. Raises ValueError before anything is allocated.
    """
    model, weights = open_model(source, config)
    state = {name: stored.read() for name, stored in weights.items()}
    if model.config.tie_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    return model


def open_model(source: StoredModel, config: ModelConfig | None = None) -> tuple[Llama, dict[str, StoredTensor]]:
    """The model without storage, and the stored tensor of each name in its `stored_state`. See `read_model`."""
    directory, config = source.directory, config or source.config
    found = stored_tensors(*weight_files(directory))
    size = sum(path.stat().st_size for path in {stored.path for stored in found.values()})
    fits = 4 * config.context * config.head_dim <= max(MAX_ROPE_BYTES, size)
    require(fits, f"{directory / CONFIG}: a context of {config.context} has a RoPE table that exceeds the weights")
    with torch.device("meta"):
        model = Llama(config)
    # transformers < 4.32 stored rotary frequencies too.
    found = {name: found[name] for name in found if not name.endswith(".rotary_emb.inv_freq")}
    if config.tie_embeddings and "lm_head.weight" in found:
        head, embedding = found.pop("lm_head.weight"), found.get("model.embed_tokens.weight")
        same = embedding and embedding.shape == head.shape and torch.equal(embedding.read(), head.read())
        require(same, f"{head.path}: lm_head.weight is not the embedding, but tie_word_embeddings is true")
    expected, stored = stored_state(model), layout(source.described, config)
    matched, differs = {}, f"{directory / WEIGHTS} does not match {directory / CONFIG}: it"
    for name, ours in stored.places(expected).items():
        require(name in found, f"{differs} lacks {name}")
        there, wanted = found.pop(name), stored.to_theirs(ours, expected)
        require(there.shape == wanted.shape, f"{differs} has the wrong shape for {name}")
        known = there.dtype in STORED_DTYPES or not wanted.is_floating_point()
        require(known, f"{differs} has a dtype other than {', '.join(STORED_DTYPES)} for {name}")
        rows = [len(expected[each]) for each in ours] if len(ours) > 1 else []
        for part, each in enumerate(ours):
            matched[each] = replace(there, change=partial(stored.to_ours, each, rows=rows, part=part))
    require(not found, f"{differs} has an unknown {min(found, default='')}")
    return model, matched


def read_tokenizer(source: StoredModel) -> Tokenizer:
    """The tokenizer beside a model. Raises ValueError if it is missing, damaged or does not match the model."""
    directory, kind, described = source.directory, source.tokenizer, source.described
    theirs = (directory / "tokenizer.json").is_file()
    # transformers saves a tokenizer.json, and reads no tokenizer.model beside it.
    ours = kind in TOKENIZER_KINDS and not (kind == SentencePieceTokenizer.kind and theirs)
    if kind == ByteTokenizer.kind and theirs:
        added = read_json(directory / "tokenizer.json", dict).get("added_tokens", ())
        ours = len(added) <= 1  # or else tokens were added
    generation = read_json(directory / GENERATION, dict) if (directory / GENERATION).is_file() else {}
    ends = []
    for ids in (described.get("eos_token_id"), generation.get("eos_token_id")):
        ends += ids if isinstance(ids, list) else [] if ids is None else [ids]
    require(is_a(ends, list[int]), f"{directory}: eos_token_id must be a token id or a list of them")
    if kind and ours:
        tokenizer = load_tokenizer(kind, directory, source.config.vocab_size)
        tokenizer.files = read_files(directory) | tokenizer.files
    else:
        tokenizer = read_directory(directory)
    tokenizer.ends |= set(ends)
    tokenizer.token_ids = {name: described[name] for name in TOKEN_IDS if name in described}
    tokenizer.generation = generation
    needed, there = tokenizer.text_vocab_size, source.config.vocab_size  # some models round it up
    require(needed <= there, f"{directory}: the tokenizer needs {needed} ids, and the model has {there}")
    return tokenizer
