"""The adapters that a model holds at a time, all of them ready for any token of any step."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ...kernels.linear import AdaptedRows, Addition, Linear
from ..config import EngineConfig
from ..errors import ConfigError, ModelError
from ..kv_cache.prefix_cache import BlockHash
from ..lora_request import LoRARequest
from ..models import Decoder
from .adapter import Adapter, LowRank, adaptable, read_additions
from .adapter_folder import AdapterConfig, adapter_identity

logger = logging.getLogger(__name__)


class LoraAdapters:
    """Up to `max_loras` of them; one that no request uses makes place for another, the longest unused first.

    Their matrices stand side by side: whichever of them a step's tokens want, each projection has two products more.
    While none is held, and in steps whose tokens want none, the model is as it is without.
    """

    def __init__(self, model: Decoder, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype, self._device = dtype, device
        self._parts = adaptable(model.parts)
        self._names: dict[Linear, list[str]] = {}
        for name, part in self._parts.items():
            self._names.setdefault(part.linear, []).append(name)
        self._rows = AdaptedRows()
        # By folder, the longest unused first.
        self._held: dict[Path, Adapter] = {}
        self._identities: dict[Path, str] = {}
        self._numbers = count(1)
        # Whose each of the columns is that the adapters' ranks make together.
        self._owners = torch.empty(0, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, model: Decoder, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> Self | None:
        """With the `lora_modules`; None where LoRA is off. Raises what `load` does."""
        if not config.enable_lora:
            return None
        loras = cls(model, config, dtype, device)
        for module in config.lora_modules:
            loras.load(module)
        return loras

    def has_place_for(self, request: LoRARequest) -> bool:
        """Whether `load` need not wait until requests with other adapters have ended."""
        is_held = request.folder in self._held
        return is_held or len(self._held) < self._config.max_loras or self._unused() is not None

    def load(self, request: LoRARequest) -> Adapter:
        """The adapter of a request, read where it is not held yet; there has to be a place for it.

        Raises `ModelError` or `ConfigError` saying why it cannot be used; then nothing has changed.
        """
        folder = request.folder
        if (held := self._held.pop(folder, None)) is None:
            return self._taken_in(folder)
        self._held[folder] = held
        return held

    def hash_root(self, request: LoRARequest) -> BlockHash | None:
        """Where the hashes begin of blocks that are computed with a request's adapter; None where it is not held."""
        held = self._held.get(request.folder)
        return None if held is None else held.hash_root

    @contextmanager
    def applied(self, numbers: Tensor, wanted: Tensor | None) -> Iterator[None]:
        """Add to a step's products. numbers: [num_tokens] int64, the number of each token's adapter, or 0.

        wanted: [n] int64, the tokens that are left in the last layer, if not all are.
        """
        foreign = numbers.unsqueeze(1) != self._owners
        with self._rows.without(foreign, None if wanted is None else foreign[wanted]):
            yield

    def _taken_in(self, folder: Path) -> Adapter:
        before = dict(self._held)
        adapter = self._read(folder)
        if len(before) >= self._config.max_loras:
            leaving = self._unused()
            assert leaving is not None, "all adapters are in use"
            del self._held[leaving]
        self._held[folder] = adapter
        if self._device.type == "cuda" and adapter.number == 1 and not self._config.enforce_eager:
            logger.info("steps in which a token has a LoRA adapter run without CUDA graphs")
        try:
            self._install()
        except torch.OutOfMemoryError as error:
            self._held = before
            self._install()
            raise ModelError(
                f"LoRA adapter {folder} does not fit into the GPU's memory: name it in lora_modules, so that room is "
                "kept for it, or lower gpu_memory_utilization"
            ) from error
        return adapter

    def _unused(self) -> Path | None:
        """The one that was not used for the longest time, of those that no request has."""
        return next((folder for folder, adapter in self._held.items() if not adapter.num_requests), None)

    def _read(self, folder: Path) -> Adapter:
        config = AdapterConfig.read(folder)
        if config.rank > self._config.max_lora_rank:
            raise ConfigError(
                f"LoRA adapter {folder} has r={config.rank}, above max_lora_rank={self._config.max_lora_rank}: "
                f"raise max_lora_rank to {config.rank}"
            )
        additions = read_additions(folder, config, self._parts, self._dtype)
        try:
            identity = adapter_identity(folder)
        except OSError as error:
            raise ModelError(f"LoRA adapter {folder} cannot be read: {error}") from error
        # Answers were told apart by what it was.
        if self._identities.setdefault(folder, identity) != identity:
            raise ModelError(f"LoRA adapter {folder} is another than before: give it a folder of its own, or restart")
        return Adapter(next(self._numbers), identity, config.rank, additions)

    def _install(self) -> None:
        """Put the matrices of all that are held in the place of those that were."""
        held = list(self._held.values())
        self._owners = torch.tensor(
            [adapter.number for adapter in held for _ in range(adapter.rank)], dtype=torch.int64, device=self._device
        )
        for linear, names in self._names.items():
            wanted = [name for name in names if any(name in adapter.additions for adapter in held)]
            additions = [self._side_by_side(name, held) for name in wanted]
            if additions or linear.is_adapted:
                linear.adapt(self._rows, additions)

    def _side_by_side(self, name: str, held: list[Adapter]) -> Addition:
        part = self._parts[name]
        pairs = [adapter.additions.get(name) or self._nothing(name, adapter.rank) for adapter in held]
        down, up = torch.cat([each.down for each in pairs]), torch.cat([each.up for each in pairs])
        return Addition(part.start, down.to(self._device), up.to(self._device))

    def _nothing(self, name: str, rank: int) -> LowRank:
        part = self._parts[name]
        shapes = ((rank, part.linear.num_inputs), (rank, part.size))
        return LowRank(*(torch.zeros(shape, dtype=self._dtype) for shape in shapes))
