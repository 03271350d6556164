"""In which numbers a model computes: beside the model, what decides which workers answer."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from ...engine.config import EngineConfig


class Precision(NamedTuple):
    """Workers of one precision share queues and cached answers. The fields are `EngineConfig`'s."""

    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """That of a job as it is stored; one of before there was a choice does not say."""
        return cls(**{name: spec[name] for name in cls._fields if name in spec})

    def check(self) -> None:
        """Raises `ConfigError` for what no worker could be started with."""
        EngineConfig(**self._asdict())

    @property
    def worker_options(self) -> list[str]:
        """What `headrace worker` is started with for it: what differs from the defaults."""
        pairs = zip(self._fields, self, DEFAULT_PRECISION, strict=True)
        given = [(name, value) for name, value, default in pairs if value is not None and value != default]
        return [word for name, value in given for word in (f"--{name.replace('_', '-')}", value)]


DEFAULT_PRECISION = Precision()
