"""Which files a model's weights are in, and whether these are whole. Free of torch."""

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import ModelError
from .gguf.file import GgufModel, is_gguf
from .gguf.names import checkpoint_tensors
from .git_lfs import damage
from .model_folder import read_json_object

_INDEX = "model.safetensors.index.json"
# As they are published.
_MEDUSA_HEADS = "medusa_lm_head.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """Raises `ModelError` when one is not there."""
    files = sorted(_promised_tensors(folder))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder} has no {file.name}: weights must be in safetensors format")
    return files


def holds_tensor(folder: Path, names: Collection[str]) -> bool:
    """Whether a model's weights, if they are there, have a tensor by one of its names. Raises `ModelError`."""
    wanted = set(names)
    if is_gguf(folder):
        return not wanted.isdisjoint(checkpoint_tensors(GgufModel.open(folder)))
    for file, promised in _promised_tensors(folder).items():
        if not wanted.isdisjoint(promised):
            return True
        if not promised and file.is_file():
            with open_weights(file, "numpy") as tensors:
                return not wanted.isdisjoint(tensors.keys())
    return False


def open_weights(file: Path, framework: str) -> Any:
    """What `safetensors.safe_open` opens for this framework. Raises `ModelError` when the file is not whole."""
    try:
        return safe_open(file, framework=framework)
    except SafetensorError as error:
        raise ModelError(f"{file} {damage(file, f'is damaged or truncated: {error}')}") from error
    except OSError as error:
        # The file is there, whatever safetensors says of one that it may not read.
        raise ModelError(f"{file} cannot be read: check its permissions ({error})") from error


def check_weight_files(folder: Path) -> None:
    """Refuse weights that are cut short, or lack a tensor that their index promises; reads no tensor.

    A folder may be without its weights where nothing is computed. Raises `ModelError` naming the file.
    """
    for file, promised in _promised_tensors(folder).items():
        if not file.is_file():
            continue
        with open_weights(file, "numpy") as tensors:
            if missing := promised.difference(tensors.keys()):
                raise ModelError(f"{file} lacks the tensor {min(missing)}, which {_INDEX} promises")


def _promised_tensors(folder: Path) -> dict[Path, set[str]]:
    """The tensors that the index says are in each file. Raises `ModelError`."""
    index = folder / _INDEX
    if not index.is_file():
        names = ("model.safetensors", _MEDUSA_HEADS)
        return {folder / next((name for name in names if (folder / name).is_file()), names[0]): set()}
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} has no weight_map: it does not say which file holds which tensor")
    promised = defaultdict(set)
    for tensor, name in weight_map.items():
        promised[folder / name].add(tensor)
    return promised
