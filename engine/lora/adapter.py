"""An adapter's matrices, read and checked against the model that they are for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.linear import Linear
from ..checkpoints.weight_files import open_weights
from ..errors import ModelError
from ..kv_cache.block_hashes import ROOT, BlockHash
from ..models.blocks import LinearPart
from .adapter_folder import WEIGHTS_FILE, AdapterConfig

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Not those of experts: these see some of a batch's tokens, in an order of their own. Nor what makes keys and values of
# latents, which is multiplied by in two parts.
_ADAPTABLE = re.compile(
    r"(language_model\.)?model\.(language_model\.)?layers\.\d+\."
    r"((self_attn|mlp|feed_forward)\.(q|k|v|o|qkv|gate|up|down|gate_up)_proj"
    r"|self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|out_proj)|feed_forward\.w[123]|(conv|mamba)\.(in|out)_proj"
    r"|linear_attn\.(in_proj_(qkv|z|b|a|qkvz|ba)|out_proj|[qkvgbao]_proj)|per_layer_(input_gate|projection))"
)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class LowRank:
    """What is added to a projection: x @ downᵀ @ up. down: [rank, in]; up: [rank, out], times the adapter's scale."""

    down: Tensor
    up: Tensor


@dataclass(eq=False)
class Adapter:
    """An adapter that a model holds. `number`: from 1 on, no other one's; `identity`: the same for the same files.

    `additions`: by the names of the projections; none where processes that share the model have them. `num_requests`:
    how many in the engine are answered with it.
    """

    number: int
    identity: str
    rank: int
    additions: Mapping[str, LowRank]
    num_requests: int = 0

    @cached_property
    def hash_root(self) -> BlockHash:
        """Where the hashes begin of blocks whose keys and values it has a part in."""
        return blake2b(self.identity.encode(), digest_size=len(ROOT)).digest()


def adaptable(parts: Mapping[str, LinearPart]) -> dict[str, LinearPart]:
    """Of a model's projections those that adapters may add to."""
    return {name: part for name, part in parts.items() if _ADAPTABLE.fullmatch(name)}


def by_matrix(parts: Mapping[str, LinearPart]) -> dict[Linear, list[str]]:
    """The projections' names by the matrices that they are parts of."""
    names: dict[Linear, list[str]] = {}
    for name, part in parts.items():
        names.setdefault(part.linear, []).append(name)
    return names


def read_additions(
    folder: Path, config: AdapterConfig, parts: Mapping[str, LinearPart], dtype: torch.dtype
) -> dict[str, LowRank]:
    """On the host, of the model's dtype. Raises `ModelError` naming the tensor that does not fit."""
    sides: dict[str, dict[str, Tensor]] = {}
    file = folder / WEIGHTS_FILE
    with open_weights(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            module, side = _placed(file, name, parts)
            sides.setdefault(module, {})[side] = _checked(
                file, name, side, tensors.get_tensor(name), parts[module], config
            )
    if not sides:
        raise ModelError(f"{file} holds no tensor: save the adapter again")
    for module, pair in sides.items():
        if len(pair) != 2:
            missing = "B" if "A" in pair else "A"
            raise ModelError(f"{file} lacks the tensor base_model.model.{module}.lora_{missing}.weight: save it again")
    additions = {
        module: LowRank(pair["A"].to(dtype), _up(pair["B"], config.scale, parts[module].order).to(dtype))
        for module, pair in sides.items()
    }
    for module, addition in additions.items():
        _check_finite(file, module, addition)
    return additions


def _up(stored: Tensor, scale: float, order: Tensor | None) -> Tensor:
    """See `LowRank`; with outputs where the model has them."""
    scaled = stored.float() * scale
    return (scaled if order is None else scaled[order]).T.contiguous()


def _placed(file: Path, name: str, parts: Mapping[str, LinearPart]) -> tuple[str, str]:
    match = _TENSOR.fullmatch(name)
    module = "" if match is None else match["module"]
    if module not in parts:
        # What PEFT saves has the names of transformers' modules, which are not all those of checkpoints.
        others = (module.replace("model.language_model.", prefix, 1) for prefix in ("model.", "language_model.model."))
        module = next((other for other in others if other in parts), module)
    if match is None or module not in parts:
        known = sorted({part.rpartition(".")[2] for part in parts})
        raise ModelError(
            f"{file} holds a tensor {name}, which this model cannot be adapted by: target_modules may be "
            f"{', '.join(known)} of its layers (no embeddings, heads, experts or norms)"
        )
    return module, match["side"]


def _checked(file: Path, name: str, side: str, tensor: Tensor, part: LinearPart, config: AdapterConfig) -> Tensor:
    expected = (config.rank, part.linear.num_inputs) if side == "A" else (part.size, config.rank)
    if tuple(tensor.shape) != expected:
        raise ModelError(
            f"tensor {name} in {file} has shape {tuple(tensor.shape)}; r={config.rank} and the model ask for "
            f"{expected}: use the base model that the adapter was trained on"
        )
    if tensor.dtype not in _DTYPES:
        raise ModelError(
            f"tensor {name} in {file} is {str(tensor.dtype).removeprefix('torch.')}: save the adapter in bfloat16, "
            "float16 or float32"
        )
    return tensor


def _check_finite(file: Path, module: str, addition: LowRank) -> None:
    """As it is multiplied with: beside its tokens in a batch there are others', and 0 × infinity would be theirs."""
    for side, matrix in (("A", addition.down), ("B", addition.up)):
        if not bool(matrix.isfinite().all()):
            dtype = str(matrix.dtype).removeprefix("torch.")
            raise ModelError(
                f"tensor base_model.model.{module}.lora_{side}.weight in {file}, scaled by lora_alpha and r, holds "
                f"values that are not finite in {dtype}: train the adapter again"
            )
