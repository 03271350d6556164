"""How weights of a checkpoint are quantised, and which of them. Free of torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal, Protocol

from ..errors import ModelError
from .other_names import SAME_NAMES, OtherNames

# In MXFP4 and in NVFP4, how many weights share a scale.
MXFP4_GROUP, NVFP4_GROUP = 32, 16


@dataclass(frozen=True)
class Int4Scheme:
    """Four bits a weight, with a scale and a zero for each group of `group_size` inputs (None: of all) (W4A16).

    `layout`: the format, or GGUF's type of blocks. `is_symmetric`: every zero is 8. `has_order`: `g_idx` says which
    group an input belongs to. `are_zeros_less_one`: GPTQ's first format stores them so.
    """

    layout: Literal["gptq", "awq", "compressed-tensors", "Q4_0", "Q4_1", "Q4_K"]
    group_size: int | None
    is_symmetric: bool
    has_order: bool = False
    are_zeros_less_one: bool = False

    @property
    def has_minima(self) -> bool:
        """Whether floats are for zeros."""
        return self.layout in ("Q4_1", "Q4_K")


@dataclass(frozen=True)
class ByteScheme:
    """A byte a weight, and activations quantised to the same as they come (W8A8).

    `scales`: one for the whole weight, for each output, or for each `block` of outputs and inputs. `scale_name`: what
    the checkpoint calls them, beside the weight.
    """

    kind: Literal["int8", "fp8"]
    scales: Literal["tensor", "channel", "block"]
    scale_name: str = "weight_scale"
    block: tuple[int, int] = (128, 128)


@dataclass(frozen=True)
class BlockScheme:
    """Up to a byte a weight, with a scale for each block of a row, of one of GGUF's types (W8A16 on some CPUs)."""

    layout: Literal["Q5_0", "Q8_0", "Q6_K"]
    group_size: int


@dataclass(frozen=True)
class Mxfp4Scheme:
    """Four bits a weight, floats, with a power of two for each `MXFP4_GROUP` inputs (W4A16 on a GPU)."""


@dataclass(frozen=True)
class Nvfp4Scheme:
    """Four bits a weight, floats, with an 8-bit float for each `NVFP4_GROUP` inputs and a factor for all (W4A16).

    Names are what the checkpoint calls them; its factor `divides` or not.
    """

    weight_name: str = "weight"
    factor_name: str = "weight_scale_2"
    divides: bool = False


WeightScheme = Int4Scheme | ByteScheme | BlockScheme | Mxfp4Scheme | Nvfp4Scheme


class Pattern(Protocol):
    """What modules' names are matched with, from their beginning."""

    def match(self, string: str, /) -> object: ...


@dataclass(frozen=True)
class Modules:
    """Modules by their names; of thousands one is found as soon as of a few. See `Pattern`."""

    names: frozenset[str]

    def match(self, string: str, /) -> bool:
        return string in self.names


@dataclass(frozen=True)
class ModulesWithin:
    """Modules by their names, or by parts of these between dots, and all in them. As fast as `Modules`."""

    names: frozenset[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> "ModulesWithin":
        return cls(frozenset(name.strip(".") for name in names))

    def match(self, string: str, /) -> bool:
        parts = string.split(".")
        runs = (accumulate(parts[start:], "{}.{}".format) for start in range(len(parts)))
        return any(run in self.names for run in chain.from_iterable(runs))


@dataclass(frozen=True)
class QuantizationConfig:
    """How a checkpoint was quantised. `method` is its name.

    `schemes`: the patterns of the modules that each is for, the first that fits counts. `ignored`: those of modules
    that stay as they were. `other_names`: what else modules may be called there.
    """

    method: str
    schemes: tuple[tuple[tuple[Pattern, ...], WeightScheme], ...]
    ignored: tuple[Pattern, ...]
    other_names: OtherNames = SAME_NAMES

    def scheme(self, names: Sequence[str]) -> WeightScheme | None:
        """How the modules of these names are quantised, which become one: None where they are not.

        Raises `ModelError` where they differ.
        """
        found = [self._scheme(name) for name in names]
        if any(each != found[0] for each in found):
            raise ModelError(
                f"quantization_config quantises {', '.join(names)} in different ways; they are multiplied as one and "
                "must be alike"
            )
        return found[0]

    def _scheme(self, name: str) -> WeightScheme | None:
        names = self.other_names.anywhere(name)
        if _matches(self.ignored, names):
            return None
        return next((scheme for patterns, scheme in self.schemes if _matches(patterns, names)), None)


def _matches(patterns: Iterable[Pattern], names: Sequence[str]) -> bool:
    return any(pattern.match(name) for pattern in patterns for name in names)
