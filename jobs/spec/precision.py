"""In which numbers a model computes: beside the model, what decides which workers answer."""

from typing import NamedTuple

from ...engine.config import EngineConfig


class Precision(NamedTuple):
    """Workers of one precision share queues and cached answers. The fields are `EngineConfig`'s."""

    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    def check(self) -> None:
        """Raises `ConfigError` for what no worker could be started with."""
        EngineConfig(**self._asdict())

    @property
    def worker_options(self) -> list[str]:
        """What `headrace worker` is started with for it: what differs from the defaults."""
        pairs = zip(self._fields, self, Precision(), strict=True)
        given = [(name, value) for name, value, default in pairs if value is not None and value != default]
        return [word for name, value in given for word in (f"--{name.replace('_', '-')}", value)]
