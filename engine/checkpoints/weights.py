"""Checkpoints in, tensors out: Hugging Face safetensors, whole or sharded, or GGUF."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ModelError
from .cut import WHOLE, Axes, Cut, without_ones
from .gguf.file import is_gguf
from .gguf.tensors import GgufTensors
from .other_names import SAME_NAMES, OtherNames
from .weight_files import open_weights, weight_files

# Buffers some exporters write that are computed, not learned.
_COMPUTED_SUFFIXES = ("rotary_emb.inv_freq", ".masked_bias")
_NORM_SUFFIXES = (
    *("norm.weight", "ln_pre.weight", "norm1.weight", "norm2.weight", ".ln_q.weight"),
    *("ln_attn.weight", "ln_mlp.weight", "ln_f.weight"),
)
# What multiplies whole vectors is near one as well.
_FACTOR_SUFFIXES = ("layer_scalar", "router.scale", "per_expert_scale")
_FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class WeightSlot:
    """Where a checkpoint's tensor `name` belongs, with `offset` added.

    `destination` may be a view into a fused parameter. What `is_optional` keeps what it has where the checkpoint has
    no such tensor. Random weights leave it as it is unless `is_drawn`, and are `constant` where that is given,
    which `constant_shrinks` where it goes with the root of the matrix's inputs. `axes`: where it has its matrix's
    outputs and inputs; `cut`: which part of the checkpoint's tensor it is, if not the whole. `may_be_turned`: the
    checkpoint may have the last two dimensions the other way round, as its shape says. `order`: [rows] int64 on the
    host, where that part has each row of this, if in an order of its own. `parts`: tensors whose rows, one after the
    other, are its own, where a checkpoint has those instead.
    """

    name: str
    destination: Tensor
    offset: float = 0.0
    is_optional: bool = False
    is_drawn: bool = True
    constant: float | None = None
    is_positive: bool = False
    constant_shrinks: bool = False
    axes: Axes = WHOLE
    cut: Cut | None = None
    may_be_turned: bool = False
    order: Tensor | None = None
    parts: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All that a checkpoint may call it, or a part of it."""
        return self.name, *self.parts

    def turned(self, tensor: Tensor) -> Tensor:
        """The checkpoint's tensor, or a view of it, with its dimensions in the destination's order."""
        is_turned = self.may_be_turned and tensor.mT.shape == self.destination.shape != tensor.shape
        return tensor.mT if is_turned else tensor

    def check(self, tensor: Tensor) -> None:
        """Raises `ValueError` unless the checkpoint's tensor fits, dimensions of size one apart.

        Floats of one width become those of another; nothing else changes its type.
        """
        expected = self.destination
        if without_ones(tensor.shape) != without_ones(expected.shape):
            raise ValueError(f"shape {tuple(tensor.shape)}; config.json asks for {tuple(expected.shape)}")
        if tensor.dtype != expected.dtype and not {tensor.dtype, expected.dtype} <= set(_FLOAT_DTYPES):
            found, wanted = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, expected.dtype))
            raise ValueError(f"dtype {found}; quantization_config in config.json asks for {wanted}")
        if self.is_positive and not bool((tensor > 0).all()):
            raise ValueError(f"the value {tensor.min().item():g}; must be positive")

    def fill(self, tensor: Tensor) -> None:
        """Take over what the checkpoint has."""
        with torch.no_grad():
            if self.has_nothing:
                self.destination.zero_()
                return
            stored = tensor.reshape(self.destination.shape)
            self.destination.copy_(stored if self.order is None else stored[self.order])
            if self.offset:
                self.destination.add_(self.offset)

    def draw(self, generator: torch.Generator) -> None:
        """Take a random weight, as `draw_weights` says, made where the generator is."""
        if not self.is_drawn:
            return
        with torch.no_grad():
            if self.constant is not None:
                self.destination.fill_(self.constant)
                return
            # All of it also where a part is wanted: however many share a model, it is the same.
            shape = self.destination.shape if self.cut is None else self.cut.shape
            if self.destination.is_floating_point():
                drawn = self._drawn(shape, generator)
            else:
                # The same bits whatever the integers' width.
                drawn = torch.randint(-(2**31), 2**31, shape, generator=generator, device=generator.device)
            if self.has_nothing:
                self.destination.zero_()
            else:
                part = drawn if self.cut is None else self.cut.of(drawn)
                self.destination.copy_(part if self.order is None else part[self.order])

    @property
    def has_nothing(self) -> bool:
        """Whether none of the checkpoint's tensor is wanted here, but zeros."""
        return self.cut is not None and not self.cut.ranges

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=generator.device)
        scale = shape[1] ** -0.5 if len(shape) > 1 else 0.1
        mean = 1.0 if self.name.endswith(_NORM_SUFFIXES + _FACTOR_SUFFIXES) else 0.0
        return drawn.mul_(scale).add_(mean)

    def stored(self) -> Tensor:
        """What a checkpoint has for this weight: a copy."""
        stored = self.destination - self.offset if self.offset else self.destination
        if self.order is not None:
            return torch.empty_like(stored).index_copy_(0, self.order.to(stored.device), stored)
        return stored.clone(memory_format=torch.contiguous_format)


def load_weights(
    folder: Path,
    slots: Iterable[WeightSlot],
    ignored: Iterable[str] = (),
    ignored_suffixes: tuple[str, ...] = (),
    ignored_prefixes: tuple[str, ...] = (),
    other_names: OtherNames = SAME_NAMES,
) -> None:
    """Fill every slot's destination from the folder's safetensors files, or the GGUF file, converting the dtype.

    Raises `ModelError` naming the tensor that is missing, there twice, has another shape or type, or is not known to
    the model (`ignored` names, suffixes and prefixes excepted), or the file that is damaged. `other_names`: see
    `ModelShape`.
    """
    with ExitStack() as stack:
        opened = _open_all(folder, stack)
        tensors = _by_names_here(folder, opened, other_names)
        wanted = list(slots)
        for slot in wanted:
            _fill(folder, tensors, slot)
        known = {name for slot in wanted for name in slot.names} | set(ignored)
        for name, (_, stored) in tensors.items():
            is_ignored = name.endswith(_COMPUTED_SUFFIXES + ignored_suffixes) or name.startswith(ignored_prefixes)
            if name not in known and stored not in known and not is_ignored:
                raise ModelError(f"{folder} holds a tensor {stored} that its architecture does not have")


def draw_weights(slots: Iterable[WeightSlot], seed: int, device: torch.device) -> None:
    """Fill every slot's destination with random weights, as a model has them before it is trained.

    Matrices are normal with a variance of one over their input size, so that activations neither grow nor vanish;
    norms are near one and biases near zero; of integers all bits are random. What is drawn depends on the seed, the
    slots and the kind of device that they are on, not on the dtype of floats.
    """
    # A host takes a minute for eight billion, a GPU no time.
    generator = torch.Generator(device).manual_seed(seed)
    for slot in slots:
        slot.draw(generator)


class _Stored(NamedTuple):
    """A tensor by its name in an open file."""

    file: Any
    name: str


def _by_names_here(folder: Path, opened: dict[str, Any], other_names: OtherNames) -> dict[str, _Stored]:
    tensors: dict[str, _Stored] = {}
    for stored, file in opened.items():
        name = other_names.here(stored)
        if name in tensors:
            raise ModelError(
                f"{folder} holds the tensors {tensors[name].name} and {stored}, which are the same one by two names: "
                "leave one of them out"
            )
        tensors[name] = _Stored(file, stored)
    return tensors


def _open_all(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Each tensor's name with the open file that holds it."""
    tensors: dict[str, Any] = {}
    if is_gguf(folder):
        gguf = GgufTensors(folder)
        return dict.fromkeys(gguf.keys(), gguf)
    for file in weight_files(folder):
        handle = stack.enter_context(open_weights(file, "pt"))
        tensors.update(dict.fromkeys(handle.keys(), handle))
    return tensors


def _fill(folder: Path, tensors: dict[str, _Stored], slot: WeightSlot) -> None:
    names = [slot.name] if slot.name in tensors or not slot.parts else slot.parts
    if missing := [name for name in names if name not in tensors]:
        if slot.is_optional:
            return
        raise ModelError(f"{folder} lacks the tensor {missing[0]}")
    try:
        tensor = _read([tensors[name] for name in names], slot)
        slot.check(tensor)
    except ValueError as error:
        raise ModelError(f"tensor {slot.name} in {folder} has {error}") from error
    slot.fill(tensor)


def _read(stored: Sequence[_Stored], slot: WeightSlot) -> Tensor:
    cut = None if slot.has_nothing else slot.cut
    if len(stored) > 1:
        joined = _joined([file.get_tensor(name) for file, name in stored])
        return joined if cut is None else cut.of_same(joined)
    [(file, name)] = stored
    if isinstance(file, GgufTensors):
        # A GGUF file's types are not torch's: it is told which to make of them. Its tensors come whole.
        whole = file.read(name, slot.destination.dtype)
        return whole if cut is None else cut.of_same(whole)
    if cut is not None:
        return cut.read(file.get_slice(name), slot.may_be_turned)
    return slot.turned(file.get_tensor(name))


def _joined(parts: list[Tensor]) -> Tensor:
    """One after the other. Raises `ValueError` where they do not go together."""
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        raise ValueError(f"parts of the shapes {', '.join(str(tuple(part.shape)) for part in parts)}")
    return torch.cat(parts)
