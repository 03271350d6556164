"""What each answer is stored with so that it can be made again: by which weights, which attempt, and how computed."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Self

import pyarrow as pa

from ...engine.checkpoints.model_config import ModelConfig
from ...engine.config import EngineConfig
from ...engine.execution.devices import resolve_device, resolve_dtype
from ...engine.sampling_params import SamplingParams
from ..spec.lora import LoraModule
from .weights import ModelWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Computation:
    """What decides about an answer's last digits, and so at times about its words; nothing in it is "auto"."""

    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    device: str
    headrace: str
    torch: str

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> Self:
        """That of an engine. Raises `ConfigError`, as loading it would."""
        device = resolve_device(config.device)
        dtype = str(resolve_dtype(config.dtype, model.checkpoint_dtype, device)).removeprefix("torch.")
        kv_cache_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        return cls(dtype, config.quantization, kv_cache_dtype, device.type, version("headrace"), version("torch"))


@dataclass(frozen=True)
class Receipts:
    """One a worker."""

    weights: ModelWeights
    computation: Computation

    def of_attempt(self, number: int, lora: LoraModule | None = None) -> dict[str, Any]:
        """What the receipts of all answers of an attempt have in common: that of a greedy one, which has no seed."""
        return {"weights": self._identity(lora), "seed": None, "attempt": number, **asdict(self.computation)}

    def _identity(self, lora: LoraModule | None) -> str | None:
        try:
            return self.weights.identity(lora)
        except OSError as error:
            logger.warning("the receipts of these rows name no weights: %s", error)
            return None


def receipt(of_attempt: Mapping[str, Any], params: SamplingParams) -> Mapping[str, Any]:
    """That of an answer; of several answers the seed is the first one's, from which the others' derive."""
    return of_attempt if params.is_greedy else {**of_attempt, "seed": params.seed}


def receipts(
    of_attempt: Mapping[str, Any], params: Sequence[SamplingParams | None], data_type: pa.StructType
) -> pa.StructArray:
    """Those of several answers, null where there are no parameters; at once, as one by one they take far longer."""
    seeds = [None if each is None or each.is_greedy else each.seed for each in params]
    fields = list(data_type)
    columns = [
        pa.array(seeds, field.type)
        if field.name == "seed"
        else pa.repeat(pa.scalar(of_attempt[field.name], field.type), len(seeds))
        for field in fields
    ]
    return pa.StructArray.from_arrays(
        columns, fields=fields, mask=pa.array([each is None for each in params], pa.bool_())
    )
