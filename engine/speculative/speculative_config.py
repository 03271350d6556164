"""How answers are guessed ahead. Frozen, checked once, free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from ..errors import ConfigError

METHODS = ("ngram", "draft_model", "medusa")
_MODEL_METHODS = ("draft_model", "medusa")
_NUMBERS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding; the names are vLLM's.

    Up to `num_speculative_tokens` tokens of each sequence are guessed and verified in one step. With the method
    "ngram" they are those that followed where its last `prompt_lookup_max` tokens, or else fewer, at least
    `prompt_lookup_min`, were before, in its own prompt and answer. With "draft_model" they are what another model of
    the same vocabulary holds for likeliest: `model`, a folder or a Hugging Face id. With "medusa" `model` names heads
    that were trained for the model: one for each token guessed. Fewer are guessed, and less often, where guesses were
    wrong. Nothing is guessed in steps of more than `disable_by_batch_size` sequences: it pays only where a step of a
    few more tokens takes hardly longer.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    disable_by_batch_size: int = 8
    model: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"speculative_config: method must be one of {', '.join(METHODS)}, not {self.method!r}")
        for name in _NUMBERS:
            _require_positive(name, getattr(self, name))
        self._check_model()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={self.prompt_lookup_min} must be at most "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )

    def _check_model(self) -> None:
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"speculative_config: model must be a folder or a Hugging Face id, not {self.model!r}")
        if self.method in _MODEL_METHODS and not self.model:
            raise ConfigError(f"speculative_config: method {self.method} needs model, a folder or a Hugging Face id")
        if self.method not in _MODEL_METHODS and self.model is not None:
            methods = " or ".join(_MODEL_METHODS)
            raise ConfigError(f"speculative_config: model is for method {methods}, not {self.method}")

    def max_step_tokens(self, max_num_seqs: int) -> int:
        """How many guesses a step may carry."""
        return min(self.disable_by_batch_size, max_num_seqs) * self.num_speculative_tokens

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """From the options that differ from the defaults. Raises `ConfigError` naming the one that is wrong."""
        if not isinstance(options, Mapping):
            raise ConfigError(f'speculative_config must be a mapping like {{"method": "ngram"}}, not {options!r}')
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"speculative_config got an unknown option {name!r}; known: {', '.join(known)}")
        # As vLLM takes it.
        if "model" in options and "method" not in options:
            options = {**options, "method": "draft_model"}
        return cls(**options)


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"speculative_config: {name} must be a whole number, at least 1, not {value!r}")
