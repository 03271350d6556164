"""Options of the engine that do not go together with a model that reads images. Free of torch."""

from ..errors import ConfigError
from ..speculative.speculative_config import SpeculativeConfig


def require_guessing_fits(speculative: SpeculativeConfig) -> None:
    """Raises `ConfigError` where a second model is to guess: of an image it would see a placeholder."""
    if speculative.method != "ngram":
        raise ConfigError(
            f"speculative_config: method {speculative.method} is not supported with a model that reads images: "
            "take ngram, or none"
        )
