"""Options of the engine that do not go together with a model that reads images. Free of torch."""

from ..config import EngineConfig
from ..errors import ConfigError


def require_fit(config: EngineConfig) -> None:
    """Raises `ConfigError` naming the option."""
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} is not supported with a model that reads images: "
            "leave it out"
        )
    if config.speculative is not None and config.speculative.method != "ngram":
        raise ConfigError(
            f"speculative_config: method {config.speculative.method} is not supported with a model that reads images: "
            "take ngram, or none"
        )
