"""Log-probabilities of single tokens, as they are reported. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability at one place of a text, with vLLM's names.

    `rank` is 1 for the likeliest token of the vocabulary. `decoded_token` is None where there is no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# What is reported of one place: the token that stands there, then the likeliest.
TokenLogprobs = Mapping[int, Logprob]


class PromptLogprobs:
    """Collects what is to be reported of a prompt's tokens, chunk by chunk, from the second token on.

    `num_top`: how many of the likeliest tokens are reported beside the prompt's own.
    """

    __slots__ = ("_entries", "_num_known", "num_top")

    def __init__(self, num_top: int, num_prompt_tokens: int) -> None:
        self.num_top = num_top
        # Nothing comes before the first token that could predict it.
        self._entries: list[TokenLogprobs | None] = [None] * num_prompt_tokens
        self._num_known = 1

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._entries)

    @property
    def is_complete(self) -> bool:
        return self._num_known == len(self._entries)

    def record(self, position: int, entry: TokenLogprobs) -> None:
        """Note what is known of the prompt's token at `position`; positions come in order, perhaps more than once."""
        self._entries[position] = entry
        self._num_known = max(self._num_known, position + 1)

    def entries(self) -> tuple[TokenLogprobs | None, ...]:
        """One for each prompt token; to be read when they are complete."""
        return tuple(self._entries)
