"""Whether a worker can hold a job's LoRA adapter."""

from dataclasses import dataclass

from ...engine.config import EngineConfig
from ...engine.errors import ConfigError, ModelError
from ...storage.errors import StorageError
from ..spec.lora import LoraModule


class AdapterNotHeld(StorageError):
    """This worker cannot hold the job's adapter, for its own options; another one may."""


@dataclass(frozen=True)
class FittingAdapters:
    """What a worker with these options can hold of them."""

    engine: EngineConfig

    def expect(self, lora: LoraModule | None) -> None:
        """Raises `AdapterNotHeld`."""
        try:
            if lora is not None:
                lora.check(self.engine.max_lora_rank)
        except ModelError:
            # It may be there later: the attempt says so.
            return
        except ConfigError as error:
            raise AdapterNotHeld(f"a worker cannot hold its adapter: {error}") from error
