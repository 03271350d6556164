"""Layers that keep a state of one size where others keep keys and values: what each kind is made of. Free of torch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from ..errors import ModelError
from .projection import Projection


class RecurrentSizes(NamedTuple):
    """Of a layer's recurrent state of a sequence: [num_heads, key_dim, value_dim] float32. All 0: it has none."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        return self.num_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True)
class StateLayersConfig(ABC):
    """What all kinds have: some inputs of a layer are convolved over the latest `conv_width` tokens.

    `layers`: one entry a layer, false where it has none of them. `module`: what a checkpoint calls it, below its layer.
    """

    conv_width: int
    layers: tuple[bool, ...]
    module: str

    @property
    @abstractmethod
    def mixed_size(self) -> int:
        """How many numbers of a token are convolved."""

    @property
    @abstractmethod
    def recurrent(self) -> RecurrentSizes: ...

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """By the names that its family's `config.json` has for them; each is at least 1."""

    @property
    @abstractmethod
    def conv_name(self) -> str:
        """What `config.json` calls `conv_width`."""

    @property
    @abstractmethod
    def divided_size(self) -> tuple[str, int]:
        """Of what several GPUs have a part each: how many there are, and its name in `config.json`."""

    @abstractmethod
    def share(self, size: int) -> Self:
        """What each of `size` GPUs has; `divided_size` is a multiple of it."""

    @property
    @abstractmethod
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor that several GPUs share, by its module's name, the sizes of what lies side by side in it.

        Of `out_proj` these are inputs, of the others outputs.
        """

    @abstractmethod
    def projections(self, prefix: str, hidden_size: int) -> Iterator[Projection]:
        """What a layer multiplies by."""

    @property
    @abstractmethod
    def num_other_weights(self) -> tuple[int, int]:
        """Of a layer, beside its matrices: those of the model's dtype, and those in float32."""

    def of_layers(self, start: int, end: int) -> Self:
        return replace(self, layers=self.layers[start:end])

    def check(self) -> None:
        """Raises `ModelError` naming the number that cannot be."""
        for name, size in self.sizes.items():
            if size < 1:
                raise ModelError(f"{name} must be at least 1, not {size}")
        if self.conv_width < 2:
            raise ModelError(f"{self.conv_name} must be at least 2, not {self.conv_width}")


@dataclass(frozen=True)
class GatedDeltaNetNames:
    """What a checkpoint calls the parts of a Gated DeltaNet.

    `mixed`: what makes queries, keys and values, one matrix of all or one of each. `conv_parts`: what may be there
    instead of what convolves them. `steps`: what says how much is written, and how much of a state kept.
    """

    mixed: tuple[str, ...] = ("in_proj_qkv",)
    conv_parts: tuple[str, ...] = ()
    gates: str = "in_proj_z"
    steps: tuple[str, str] = ("in_proj_b", "in_proj_a")
    norm: str = "norm"
    output: str = "out_proj"


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(StateLayersConfig):
    """A Gated DeltaNet: see `headrace.kernels.gated_delta`, whose sizes these are.

    `is_grouped`: the checkpoint has what belongs to one key head side by side, not all queries, then all keys.
    `norm_eps`: of the norm of what is read, where it is not the model's.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    is_grouped: bool = False
    doubles_beta: bool = False
    norm_eps: float | None = None
    names: GatedDeltaNetNames = GatedDeltaNetNames()
    module: str = "linear_attn"

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Queries, keys and values together."""
        return 2 * self.key_size + self.value_size

    @property
    def mixed_parts(self) -> tuple[int, ...]:
        """What each of the names for what is mixed stands for."""
        return (self.mixed_size,) if len(self.names.mixed) == 1 else (self.key_size, self.key_size, self.value_size)

    @property
    def recurrent(self) -> RecurrentSizes:
        return RecurrentSizes(self.num_heads, self.key_dim, self.value_dim)

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "linear_num_key_heads": self.num_key_heads,
            "linear_num_value_heads": self.num_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
        }

    @property
    def conv_name(self) -> str:
        return "linear_conv_kernel_dim"

    @property
    def divided_size(self) -> tuple[str, int]:
        # Of its other heads there are so many for each of these.
        return "linear_num_key_heads", self.num_key_heads

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        mixed, heads = (self.key_size, self.key_size, self.value_size), (self.num_heads,)
        return {
            "in_proj_qkv": mixed,
            "conv1d": mixed,
            "in_proj_z": (self.value_size,),
            # What belongs to a key head lies together.
            "in_proj_qkvz": (self.mixed_size + self.value_size,),
            "in_proj_ba": (2 * self.num_heads,),
            "in_proj_b": heads,
            "in_proj_a": heads,
            # Numbers that belong to no part of it.
            self.module: heads,
            "out_proj": (self.value_size,),
        }

    def projections(self, prefix: str, hidden_size: int) -> Iterator[Projection]:
        """By the names of checkpoints that have each part for itself: quantised are all alike."""
        for name, size in zip(self.names.mixed, self.mixed_parts, strict=True):
            yield Projection(f"{prefix}.{name}", size, hidden_size)
        yield Projection(f"{prefix}.{self.names.gates}", self.value_size, hidden_size)
        for name in self.names.steps:
            yield Projection(f"{prefix}.{name}", self.num_heads, hidden_size, is_quantizable=False)
        yield Projection(f"{prefix}.{self.names.output}", hidden_size, self.value_size)

    @property
    def num_other_weights(self) -> tuple[int, int]:
        return self.mixed_size * self.conv_width + self.value_dim, 2 * self.num_heads

    def share(self, size: int) -> Self:
        return replace(self, num_key_heads=self.num_key_heads // size, num_heads=self.num_heads // size)

    def check(self) -> None:
        super().check()
        if self.num_heads % self.num_key_heads:
            raise ModelError(
                f"linear_num_value_heads {self.num_heads} is no multiple of linear_num_key_heads {self.num_key_heads}"
            )


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(StateLayersConfig):
    """Mamba-2: see `headrace.kernels.mamba2`, whose sizes these are.

    `dt_limits`: between which a step of time is. `number_names`: what `config.json` calls the first four fields here,
    and `conv_width`. `has_norm`: what is read is normed once it is gated. `input_scales`: what each part of what is
    made of a layer's input is multiplied by: gates, inputs, what is written under, what reads, and steps of time.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    has_conv_bias: bool
    has_bias: bool
    dt_limits: tuple[float, float]
    number_names: tuple[str, str, str, str, str]
    has_norm: bool = True
    input_scales: tuple[float, ...] | None = None
    module: str = "mamba"

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def mixed_size(self) -> int:
        """What is written, under what, and by what it is read."""
        return self.inner_size + 2 * self.num_groups * self.state_dim

    @property
    def input_sizes(self) -> list[int]:
        """What lies side by side in what is made of a layer's input: gates, what is mixed, and steps of time."""
        return [self.inner_size, self.mixed_size, self.num_heads]

    @property
    def recurrent(self) -> RecurrentSizes:
        return RecurrentSizes(self.num_heads, self.state_dim, self.head_dim)

    @property
    def sizes(self) -> dict[str, int]:
        numbers = (self.num_heads, self.head_dim, self.num_groups, self.state_dim)
        return dict(zip(self.number_names[:-1], numbers, strict=True))

    @property
    def conv_name(self) -> str:
        return self.number_names[-1]

    @property
    def divided_size(self) -> tuple[str, int]:
        return self.number_names[2], self.num_groups

    @property
    def input_parts(self) -> tuple[int, ...]:
        """As `input_sizes`, with the parts of what is mixed each by itself."""
        grouped = self.num_groups * self.state_dim
        return self.inner_size, self.inner_size, grouped, grouped, self.num_heads

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        heads = (self.num_heads,)
        return {
            "in_proj": self.input_parts,
            "conv1d": self.input_parts[1:-1],
            "norm": (self.inner_size,),
            # Numbers that belong to no part of it.
            self.module: heads,
            "out_proj": (self.inner_size,),
        }

    def projections(self, prefix: str, hidden_size: int) -> Iterator[Projection]:
        yield Projection(f"{prefix}.in_proj", sum(self.input_sizes), hidden_size, self.has_bias)
        yield Projection(f"{prefix}.out_proj", hidden_size, self.inner_size, self.has_bias)

    @property
    def num_other_weights(self) -> tuple[int, int]:
        convolving = self.mixed_size * (self.conv_width + self.has_conv_bias)
        return convolving + self.inner_size * self.has_norm, 3 * self.num_heads

    def share(self, size: int) -> Self:
        return replace(self, num_groups=self.num_groups // size, num_heads=self.num_heads // size)

    def check(self) -> None:
        super().check()
        if self.num_heads % self.num_groups:
            heads, _, groups, *_ = self.number_names
            raise ModelError(f"{heads} {self.num_heads} is no multiple of {groups} {self.num_groups}")


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(StateLayersConfig):
    """A gated convolution, which has no state but its latest inputs: of `size` channels, the model's hidden size."""

    size: int
    has_bias: bool = False
    module: str = "conv"

    @property
    def mixed_size(self) -> int:
        return self.size

    @property
    def recurrent(self) -> RecurrentSizes:
        return RecurrentSizes(0, 0, 0)

    @property
    def sizes(self) -> dict[str, int]:
        return {"hidden_size": self.size}

    @property
    def conv_name(self) -> str:
        return "conv_L_cache"

    @property
    def divided_size(self) -> tuple[str, int]:
        return "hidden_size", self.size

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj": (self.size,) * 3, "conv": (self.size,), "out_proj": (self.size,)}

    def projections(self, prefix: str, hidden_size: int) -> Iterator[Projection]:
        yield Projection(f"{prefix}.in_proj", 3 * self.size, hidden_size, self.has_bias)
        yield Projection(f"{prefix}.out_proj", hidden_size, self.size, self.has_bias)

    @property
    def num_other_weights(self) -> tuple[int, int]:
        return self.size * (self.conv_width + self.has_bias), 0

    def share(self, size: int) -> Self:
        return replace(self, size=self.size // size)
