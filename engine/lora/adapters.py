"""The adapters that a model holds at a time, all of them ready for any token of any step."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

import torch

from ..config import EngineConfig
from ..errors import ModelError
from ..kv_cache.block_hashes import BlockHash
from ..lora_request import LoRARequest
from ..models.blocks import LinearPart
from .adapter import Adapter, read_additions
from .adapter_folder import AdapterConfig, adapter_identity


class LoraAdapters:
    """Up to `max_loras` of them; one that no request uses makes place for another, the longest unused first.

    From the beginning on the `lora_modules`. parts: the projections of the whole model that can be adapted. install:
    has these adapters, and those alone, ready for steps, or raises `OutOfMemoryError`. Raises what `load` does.
    """

    def __init__(
        self,
        parts: Mapping[str, LinearPart],
        config: EngineConfig,
        dtype: torch.dtype,
        install: Callable[[Sequence[Adapter]], None],
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._parts = parts
        self._install = install
        # By folder, the longest unused first.
        self._held: dict[Path, Adapter] = {}
        self._identities: dict[Path, str] = {}
        self._numbers = count(1)
        for module in config.lora_modules:
            self.load(module)

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

    def _taken_in(self, folder: Path) -> Adapter:
        before = dict(self._held)
        adapter = self._read(folder)
        if len(before) >= self._config.max_loras:
            leaving = self._unused()
            assert leaving is not None, "all adapters are in use"
            del self._held[leaving]
        self._held[folder] = adapter
        try:
            self._install(list(self._held.values()))
        except torch.OutOfMemoryError as error:
            self._held = before
            self._install(list(before.values()))
            raise ModelError(
                f"LoRA adapter {folder} does not fit into the GPU's memory: name it in lora_modules, so that room is "
                "kept for it, or lower gpu_memory_utilization"
            ) from error
        return adapter

    def _unused(self) -> Path | None:
        """The one that was not used for the longest time, of those that no request has."""
        return next((folder for folder, adapter in self._held.items() if not adapter.num_requests), None)

    def _read(self, folder: Path) -> Adapter:
        if not self._parts:
            raise ModelError(
                f"LoRA adapter {folder} cannot be used: models of this architecture cannot be adapted here"
            )
        config = AdapterConfig.read(folder)
        config.expect_rank(folder, self._config.max_lora_rank)
        additions = read_additions(folder, config, self._parts, self._dtype)
        try:
            identity = adapter_identity(folder)
        except OSError as error:
            raise ModelError(f"LoRA adapter {folder} cannot be read: {error}") from error
        # Answers were told apart by what it was.
        if self._identities.setdefault(folder, identity) != identity:
            raise ModelError(f"LoRA adapter {folder} is another than before: give it a folder of its own, or restart")
        return Adapter(next(self._numbers), identity, config.rank, additions)
