"""Weights under Hugging Face's names, in one safetensors file or several with an index. No pickle."""

import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from config import ModelConfig
from files import if_supported, is_a, read_json, require
from machine.process import out_of_memory

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The norms' names depend on the placement: `post_attention_layernorm` comes before the MLP in one of them.
NORMS = {
    "pre": {  # Llama, Qwen 3, StableLM
        "attention_residual.norm": "input_layernorm",
        "mlp_residual.norm": "post_attention_layernorm",
    },
    "reordered": {  # OLMo 2
        "attention_residual.norm": "post_attention_layernorm",
        "mlp_residual.norm": "post_feedforward_layernorm",
    },
    "sandwich": {  # the names of Gemma 2
        "attention_residual.norm": "input_layernorm",
        "attention_residual.norm_out": "post_attention_layernorm",
        "mlp_residual.norm": "pre_feedforward_layernorm",
        "mlp_residual.norm_out": "post_feedforward_layernorm",
    },
}
# The weights that the architectures have: matrices, and gains and biases of norms.
IN_BLOCK = r"self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj|self_attn\.(rotated_)?[qk]_norm|\w+_layernorm"
KNOWN = rf"(lm_head|model\.(embed_tokens|norm|layers\.\d+\.({IN_BLOCK})))\.weight|model\.\S*(norm|[qkv]_proj)\.bias"


def hugging_face_name(ours: str, config: ModelConfig) -> str:
    """Hugging Face's name for a weight of a model like `config`. Weights that no architecture has get "model." too."""
    for path, theirs in NORMS.get(config.placement, {}).items():
        ours = ours.replace(f".{path}.", f".{theirs}.")
    if config.qk_norm == "full":  # the norm is inside the module that joins the heads
        ours = re.sub(r"([qk]_norm)\.norm\.", r"\1.", ours)
    if config.placement in ("residual", "siamese"):
        ours = ours.replace("final_norm.norm.", "final_norm.")
    ours = re.sub(r"^final_norm\.", "norm.", ours)
    return ours if ours.startswith("lm_head.") else f"model.{ours}"


@dataclass(frozen=True)
class Layout:
    """How the weights of a model are stored, where that is not as in Llama.

    names: names of modules, by Llama's. Matrices with one name are stored as one, below each other in our order.
    interleaved: RoPE rotates the pairs of features (2i, 2i + 1), not (i, i + R/2).
    factors: what their configuration multiplies weights with, by our names of modules.
    """

    config: ModelConfig
    names: dict[str, str] = field(default_factory=dict)
    interleaved: bool = False
    factors: dict[str, float] = field(default_factory=dict)

    def places(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Our `names` of weights, by the name under which they are stored."""
        found: dict[str, list[str]] = {}
        for name in names:
            parts = hugging_face_name(name, self.config).split(".")
            found.setdefault(".".join(self.names.get(part, part) for part in parts), []).append(name)
        return found

    def to_ours(self, name: str, stored: Tensor, rows: list[int], part: int) -> Tensor:
        """The weight with our `name`, which is a `part` of what is stored if that has `rows` of several."""
        weight = self.reordered(name, stored.split(rows)[part] if rows else stored)
        module = name.split(".")[-2]
        factor = self.factors.get(module, 1.0)
        if math.isclose(factor, 1):
            return weight
        start = float("norm" in module and self.config.norm_args.get("zero_centered", False))  # the gain is 1 + weight
        return ((weight.float() + start) * factor - start).to(weight.dtype)

    def to_theirs(self, names: list[str], state: dict[str, Tensor]) -> Tensor:
        """What is stored of our weights with these `names` in `state`."""
        parts = [self.reordered(name, state[name], back=True) for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def reordered(self, name: str, weight: Tensor, back: bool = False) -> Tensor:
        """With interleaved pairs, `weight` with each head's features in our order, or `back` in theirs."""
        if not self.interleaved or name.split(".")[-2] not in ("q_proj", "k_proj"):
            return weight
        order, rotated = torch.arange(self.config.head_dim), int(self.config.head_dim * self.config.rotary_fraction)
        order[:rotated] = order[:rotated].view(-1, 2).T.flatten()
        return weight.unflatten(0, (-1, len(order)))[:, order.argsort() if back else order].flatten(0, 1)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `dtype` is safetensors' name for it, such as BF16. `change` makes it a weight of ours."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    change: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def read(self) -> Tensor:
        """The tensor in its own memory, because matrix products round differently at other alignments.

        The file is closed again, so that its pages do not add up. Raises ValueError for NaN and inf, and MemoryError.
        """
        try:
            with safe_open(self.path, "pt") as file:
                tensor = self.change(file.get_tensor(self.name)).clone()
        except Exception as error:
            if out_of_memory(error):
                raise MemoryError(f"out of memory: {self.path} has {self.name} of the shape {self.shape}") from error
            raise
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise ValueError(f"{self.path}: {self.name} has values that are NaN or infinite")
        return tensor


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights. Raises ValueError if there are none that can be read safely."""
    path = directory / INDEX
    adapter = directory / "adapter_config.json"
    require(not adapter.is_file(), f"{adapter} is of an adapter, which would be left out; merge it into the weights")
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    pickled = "pickled weights can run code: convert them with transformers"
    require(path.is_file(), f"{directory} holds no {WEIGHTS} and no {INDEX}; {pickled}")
    weight_map = read_json(path, dict).get("weight_map")
    require(is_a(weight_map, dict[str, str]), f"{path}: not an index with a weight_map")
    files = [Path(file) for file in sorted(set(weight_map.values()))]
    inside = all(str(file) == file.name and file.suffix == ".safetensors" for file in files)
    require(inside, f"{path}: weight_map names what is not a .safetensors file in this directory")
    return [directory / file for file in files]


def stored_tensors(*files: Path) -> dict[str, StoredTensor]:
    """The tensors of safetensors files by name. Only the headers are read. Raises ValueError for a damaged file."""
    found = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    part = file.get_slice(name)
                    found[name] = StoredTensor(path, name, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: not a readable safetensors file: {error}") from None
    return found


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file, each tensor contiguous. Raises OSError if the disk is full."""
    path.touch()
    mode = path.stat().st_mode  # follows the umask; safetensors makes files with 0600
    try:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path, metadata={"format": "pt"})  # transformers asks for it
        with suppress(PermissionError):  # as gcsfuse and CIFS refuse it
            if_supported(path, path.chmod, mode)
    except SafetensorError as error:  # a full disk, as safetensors reports it
        raise OSError(f"{path} cannot be written: {error}") from None
