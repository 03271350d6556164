"""The tensors of layers with a Gated DeltaNet under a checkpoint's names, as Qwen3.5's are. Free of torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from ..scalars import positive
from .sources import Places, Source, spread

# llama.cpp repeats key heads one after the other, so that its files have the first value head of each, then the second.
_TILED = ("qwen35", "qwen35moe")
ARCHITECTURES = ("qwen3next", *_TILED)
# Of these every output is a number of a value head, or as many as a value head has numbers.
_OF_HEADS = {"ssm_alpha": "in_proj_a.weight", "ssm_beta": "in_proj_b.weight", "attn_gate": "in_proj_z.weight"}
_MODULES = (*_OF_HEADS, "attn_qkv", "ssm_a", "ssm_ba", "ssm_conv1d", "ssm_dt", "ssm_norm", "ssm_out")


def is_of_gated_delta_net(module: str) -> bool:
    """Whether what is called so belongs to a layer of this kind."""
    return module in _MODULES


@dataclass(frozen=True)
class GatedDeltaNetTensors:
    """What is known of a model's layers of that kind."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    is_tiled: bool

    @classmethod
    def of(cls, metadata: dict[str, Any], architecture: str) -> Self:
        """Raises `KeyError` and `ModelError`."""
        names = ("group_count", "time_step_rank", "state_size", "inner_size")
        keys, heads, key_dim, size = (positive(metadata, f"{architecture}.ssm.{name}") for name in names)
        return cls(keys, heads, key_dim, size // heads, architecture in _TILED)

    def named(self, module: str, source: Source) -> Iterator[tuple[str, Source]]:
        """A tensor `is_of_gated_delta_net`, in its parts by their names within the layer."""
        for name, part in self._parts(module, source):
            yield f"linear_attn.{name}", part

    def _parts(self, module: str, source: Source) -> Iterator[tuple[str, Source]]:
        num_outputs = source.info.shape[0]
        match module:
            case "attn_qkv":
                yield "in_proj_qkv.weight", replace(source, rows=self._mixed)
            case "ssm_conv1d":
                yield "conv1d.weight", replace(source, rows=self._mixed, restored=lambda numbers: numbers.unsqueeze(1))
            case "ssm_out":
                yield "out_proj.weight", replace(source, groups=self._heads if self.is_tiled else None)
            case "ssm_a":
                yield "A_log", replace(source, rows=self._heads, restored=lambda numbers: numbers.neg().log())
            case "ssm_dt":
                yield "dt_bias", replace(source, rows=self._heads)
            case "ssm_norm":
                yield "norm.weight", source
            case "ssm_ba":
                # A key head's value heads have theirs side by side.
                places = np.arange(2 * self.num_heads).reshape(self.num_key_heads, 2, -1)
                yield "in_proj_b.weight", replace(source, rows=places[:, 0].ravel())
                yield "in_proj_a.weight", replace(source, rows=places[:, 1].ravel())
            case _:
                yield _OF_HEADS[module], replace(source, rows=spread(self._heads, num_outputs // self.num_heads))

    @cached_property
    def _heads(self) -> Places:
        """Where the file has each value head; a checkpoint has those of a key head side by side."""
        places = np.arange(self.num_heads)
        return places.reshape(-1, self.num_key_heads).T.ravel() if self.is_tiled else places

    @cached_property
    def _mixed(self) -> Places:
        """Where it has queries, keys and values."""
        num_keys = 2 * self.num_key_heads * self.key_dim
        return np.concatenate((np.arange(num_keys), num_keys + spread(self._heads, self.value_dim)))
