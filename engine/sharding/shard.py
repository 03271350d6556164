"""One rank's share of a model: whole attention heads, and as much of each MLP and of the vocabulary (Megatron-LM)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..checkpoints.cut import WHOLE, Axis, Cut
from ..checkpoints.model_config import LatentAttentionConfig, ModelConfig
from ..checkpoints.state_layers import StateLayersConfig
from ..checkpoints.weights import WeightSlot
from ..errors import ConfigError
from .shares import Range, local_model, require_splittable, share_of

_KEYS = ("k_proj", "v_proj")
_FUSED = ("gate_up_proj", "input_linear")
_INNER = ("gate_proj", "up_proj", "w1", "w3", "c_fc", *_FUSED)
_FROM_INNER = ("down_proj", "w2", "c_proj", "output_linear")
_VOCABULARY = ("embed_tokens", "embeddings", "lm_head")
_SHARED = (".shared_expert.", ".shared_experts.", ".shared_mlp.")
# What a quantised checkpoint says of a matrix that is not split, and nothing new: which group an input is in, in order.
_OF_THE_WHOLE = (".weight_shape", ".g_idx", ".weight_g_idx")


class Part(NamedTuple):
    """Of a matrix with so many outputs or inputs in all those in these ranges."""

    by_outputs: bool
    total: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Shard:
    """What rank `rank` of `size` has of `model`, which is not split yet. Raises `ConfigError` where it cannot be."""

    rank: int
    size: int
    model: ModelConfig

    def __post_init__(self) -> None:
        require_splittable(self.model, self.size)

    @property
    def local(self) -> ModelConfig:
        """The share as a model of its own."""
        return local_model(self.model, self.rank, self.size)

    @property
    def words(self) -> Range:
        """The tokens whose embeddings and logits are here."""
        return share_of(self.model.vocab_size, self.rank, self.size)

    @property
    def num_words(self) -> list[int]:
        """How many of them each rank has."""
        shares = (share_of(self.model.vocab_size, rank, self.size) for rank in range(self.size))
        return [end - start for start, end in shares]

    def cut(self, slots: Iterable[WeightSlot]) -> Iterator[WeightSlot]:
        """The slots, told which part of the checkpoint's tensor each takes.

        Raises `ConfigError` where a group of a quantised weight would be split.
        """
        return (self._cut(slot) for slot in slots if not slot.name.endswith(_OF_THE_WHOLE))

    def _cut(self, slot: WeightSlot) -> WeightSlot:
        name, _, suffix = slot.name.rpartition(".")
        # Of experts that lie stacked, the last part of the name is the projection's.
        part = self.part(name) or self.part(slot.name)
        if part is None or slot.axes == WHOLE:
            return slot
        shape = tuple(slot.destination.shape)
        if suffix == "bias" and not part.by_outputs:
            # What the ranks compute is summed: one of them adds it.
            return slot if self.rank == 0 else replace(slot, cut=Cut(shape, 0, ()))
        if slot.constant is not None and slot.constant_shrinks and not part.by_outputs:
            slot = replace(slot, constant=slot.constant * self.size**-0.5)
        axis = slot.axes.outputs if part.by_outputs else slot.axes.inputs
        return slot if axis is None else replace(slot, cut=_cut(slot, part, axis, self.size))

    def part(self, name: str) -> Part | None:
        """What is here of a matrix; None where every rank has the whole."""
        if self.model.layers and name.startswith(prefix := f"{self.model.names.layers}."):
            index = int(name.removeprefix(prefix).partition(".")[0]) - self.model.stage.first_layer
            return Shard(self.rank, self.size, self.model.of_layer(index)).part(name)
        module, states = name.rpartition(".")[2], self.model.state_layers
        if states is not None and f".{states.module}." in f"{name}." and module in states.parts:
            return self._part_of_states(module, states)
        if module in _VOCABULARY:
            return Part(True, self.model.vocab_size, (self.words,))
        return self._part_of_latents(module) or self._part_of_attention(name, module) or self._part_of_mlp(name, module)

    def _part_of_states(self, module: str, states: StateLayersConfig) -> Part:
        """Of a layer with a state."""
        sizes = states.parts[module]
        shares = tuple(share_of(size, self.rank, self.size) for size in sizes)
        return Part(module != "out_proj", sum(sizes), _side_by_side(sizes, shares))

    def _part_of_latents(self, module: str) -> Part | None:
        """Of what makes heads of latents, or is made of heads."""
        latent, output = self.model.latent_attention, self.model.names.attention_output
        if latent is None or (of_head := _head_sizes(latent, output).get(module)) is None:
            return None
        size = self.model.num_attention_heads * of_head
        return Part(module != output, size, (share_of(size, self.rank, self.size),))

    def _part_of_attention(self, name: str, module: str) -> Part | None:
        if module == "q_proj":
            # A head's gate, where it has one, lies behind its query.
            size = self._query_size * (2 if self.model.has_output_gate else 1)
            return Part(True, size, (share_of(size, self.rank, self.size),))
        if module in _KEYS:
            return Part(True, self._key_size, (self._keys,))
        if module == "qkv_proj":
            sizes = (self._query_size, self._key_size, self._key_size)
            return Part(True, sum(sizes), _side_by_side(sizes, (self._queries, self._keys, self._keys)))
        heads, names = self.model.num_attention_heads, self.model.names
        if module == "sinks" or (self.model.has_head_gates and name.endswith(f"{names.attention}.gate_proj")):
            return Part(True, heads, (share_of(heads, self.rank, self.size),))
        if module == names.attention_output:
            return Part(False, self._query_size, (self._queries,))
        return None

    def _part_of_mlp(self, name: str, module: str) -> Part | None:
        """Of an ordinary one, or of an expert."""
        if module not in (*_INNER, *_FROM_INNER):
            return None
        inner = self._inner_size(name)
        share = share_of(inner, self.rank, self.size)
        if module in _FUSED:
            return Part(True, 2 * inner, _side_by_side((inner, inner), (share, share)))
        return Part(module in _INNER, inner, (share,))

    @property
    def _query_size(self) -> int:
        return self.model.num_attention_heads * self.model.head_dim

    @property
    def _key_size(self) -> int:
        return self.model.num_key_value_heads * self.model.head_dim

    @property
    def _queries(self) -> Range:
        return share_of(self._query_size, self.rank, self.size)

    @property
    def _keys(self) -> Range:
        """Where there are more ranks than heads, some have the same one."""
        heads, head_dim = self.model.num_key_value_heads, self.model.head_dim
        first = self.rank * heads // self.size
        return first * head_dim, (first + max(1, heads // self.size)) * head_dim

    def _inner_size(self, name: str) -> int:
        moe = self.model.moe
        if moe is not None and (".experts." in name or ".block_sparse_moe." in name):
            return moe.intermediate_size
        if moe is not None and any(shared in name for shared in _SHARED):
            return moe.shared_expert_intermediate_size or 0
        return self.model.intermediate_size


def _head_sizes(latent: LatentAttentionConfig, output: str) -> dict[str, int]:
    """What a head has of each matrix that has something of each; of the others every rank has the whole."""
    return {
        "q_proj": latent.query_dim,
        "q_b_proj": latent.query_dim,
        "kv_b_proj": latent.plain_dim + latent.value_dim,
        output: latent.value_dim,
    }


def _cut(slot: WeightSlot, part: Part, axis: Axis, size: int) -> Cut:
    # The last group may be a shorter one.
    if any(place % axis.unit and place != part.total for pair in part.ranges for place in pair):
        where = "outputs" if part.by_outputs else "inputs"
        raise ConfigError(
            f"tensor_parallel_size={size} would split groups of {axis.unit} {where} of {slot.name}: take a smaller one"
        )
    shape = list(slot.destination.shape)
    shape[axis.dim] = -(-part.total // axis.unit)
    ranges = tuple((start // axis.unit, -(-end // axis.unit)) for start, end in part.ranges)
    return Cut(tuple(shape), axis.dim, ranges)


def _side_by_side(sizes: tuple[int, ...], ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """Ranges of matrices that lie one after the other."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple((base + start, base + end) for base, (start, end) in zip(starts, ranges, strict=True))
