"""Checkpoints in, tensors out: Hugging Face safetensors, whole or sharded."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import ModelError
from .model_config import read_json_object

# Buffers some exporters write that are computed, not learned.
_COMPUTED_SUFFIXES = ("rotary_emb.inv_freq", ".masked_bias")


@dataclass(frozen=True)
class WeightSlot:
    """Where a checkpoint's tensor `name` belongs, with `offset` added.

    `destination` may be a view into a fused parameter.
    """

    name: str
    destination: Tensor
    offset: float = 0.0

    def fill(self, tensor: Tensor) -> None:
        """Take over what the checkpoint has."""
        with torch.no_grad():
            self.destination.copy_(tensor)
            if self.offset:
                self.destination.add_(self.offset)

    def stored(self) -> Tensor:
        """What a checkpoint has for this weight: a copy."""
        return self.destination - self.offset if self.offset else self.destination.clone()


def load_weights(folder: Path, slots: Iterable[WeightSlot], ignored: Iterable[str] = ()) -> None:
    """Fill every slot's destination from the folder's safetensors files, converting the dtype.

    Raises `ModelError` naming the tensor that is missing, has another shape, or is not known to the model
    (`ignored` names excepted), or the file that is damaged.
    """
    with ExitStack() as stack:
        tensors = _open_all(folder, stack)
        wanted = list(slots)
        for slot in wanted:
            _fill(folder, tensors, slot)
        known = {slot.name for slot in wanted} | set(ignored)
        for name in tensors:
            if name not in known and not name.endswith(_COMPUTED_SUFFIXES):
                raise ModelError(f"{folder} holds a tensor {name} that its architecture does not have")


def draw_weights(slots: Iterable[WeightSlot], seed: int) -> None:
    """Fill every slot's destination with random weights, as a model has them before it is trained.

    Matrices are normal with a variance of one over their input size, so that activations neither grow nor vanish;
    norms are near one and biases near zero. What is drawn depends on the seed and the slots, not on the dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    for slot in slots:
        destination = slot.destination
        drawn = torch.randn(destination.shape, generator=generator)
        scale = destination.shape[1] ** -0.5 if destination.ndim > 1 else 0.1
        mean = 1.0 if slot.name.endswith("norm.weight") else 0.0
        with torch.no_grad():
            destination.copy_(drawn.mul_(scale).add_(mean))


def _open_all(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Each tensor's name with the open file that holds it."""
    tensors: dict[str, Any] = {}
    for file in _weight_files(folder):
        try:
            handle = stack.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged or truncated: {error}") from error
        tensors.update(dict.fromkeys(handle.keys(), handle))
    return tensors


def _weight_files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index} has no weight_map: it does not say which file holds which tensor")
        names = sorted(set(weight_map.values()))
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder} has no {file.name}: weights must be in safetensors format")
        yield file


def _fill(folder: Path, tensors: dict[str, Any], slot: WeightSlot) -> None:
    if slot.name not in tensors:
        raise ModelError(f"{folder} lacks the tensor {slot.name}")
    tensor: Tensor = tensors[slot.name].get_tensor(slot.name)
    if tensor.shape != slot.destination.shape:
        raise ModelError(
            f"tensor {slot.name} in {folder} has shape {tuple(tensor.shape)}; "
            f"config.json asks for {tuple(slot.destination.shape)}"
        )
    slot.fill(tensor)
