"""Files of weights: one safetensors file, or several with an index. No pickle."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from files import load_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 16 << 20
PICKLED = ("*.bin", "*.pth", "*.pt", "*.ckpt")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `dtype` is safetensors' name of it, such as BF16."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        """The tensor in memory of its own, because matrix products round differently at other alignments.

        The file is closed again, so that the pages of a large file do not add up. Raises ValueError for NaN and inf.
        """
        with safe_open(self.path, "pt") as file:
            tensor = file.get_tensor(self.name).clone()
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise ValueError(f"{self.path}: {self.name} has values that are NaN or infinite")
        return tensor


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights. Raises ValueError, in one line, if there are none that can be read safely."""
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if (directory / INDEX).is_file():
        return sorted({directory / file for file in _read_index(directory).values()})
    pickled = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
    if pickled:
        raise ValueError(
            f"{directory / pickled[0]} is a pickle, which can run code when it is read; convert it with transformers: "
            "from_pretrained, then save_pretrained, writes model.safetensors"
        )
    raise ValueError(f"{directory} holds no {WEIGHTS} and no {INDEX}")


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory by name. Only the headers of the files are read.

    Raises ValueError, naming the file, if one is missing or damaged, or if they differ from the index.
    """
    found: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        _check_header(path)
        for tensor in tensors_in(path):
            if tensor.name in found:
                raise ValueError(f"{path}: {tensor.name} is in {found[tensor.name].path.name} as well")
            found[tensor.name] = tensor
    if not (directory / WEIGHTS).is_file():
        for name, file in _read_index(directory).items():
            if name not in found or found[name].path.name != file:
                raise ValueError(f"{directory / file} lacks {name}, which {INDEX} says it has")
    return found


def _check_header(path: Path) -> None:
    """Raise ValueError if the header is too large to be that of a model with `MAX_LAYERS`, before memory is taken."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"{path}: not a readable safetensors file: its header has {size} bytes")


def _read_index(directory: Path) -> dict[str, str]:
    """The file of each tensor. Raises ValueError if the index is damaged or names a file outside the directory."""
    path = directory / INDEX
    try:
        files = load_json(path)["weight_map"]
        valid = isinstance(files, dict) and files and all(isinstance(file, str) for file in files.values())
    except (OSError, ValueError, TypeError, KeyError):
        valid = False
    if not valid:
        raise ValueError(f"{path}: not a readable index with a weight_map")
    for file in sorted(set(files.values())):
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file):
            raise ValueError(f"{path}: weight_map names {file!r}, which is not a .safetensors file in this directory")
        if not (directory / file).is_file():
            raise ValueError(f"{directory / file} is missing; {INDEX} names it")
    return files


def tensors_in(path: Path) -> Iterator[StoredTensor]:
    """The tensors of a safetensors file. Raises ValueError if it is missing or damaged."""
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(name)
                yield StoredTensor(path, name, tuple(part.get_shape()), part.get_dtype())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from None


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises OSError if the disk is full."""
    path.touch()
    mode = path.stat().st_mode  # that of the umask; safetensors' own is 0600
    try:
        save_file(tensors, path, metadata={"format": "pt"})  # which transformers asks for
        path.chmod(mode)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path} cannot be written: {error}") from None
