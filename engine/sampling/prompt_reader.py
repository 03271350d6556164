"""Log-probabilities of prompt tokens, read from the logits of the step that computes them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..logprobs import PromptLogprobs
from ..scheduling.scheduled_sequence import ScheduledSequence
from ..transfer import to_device
from .sampler import LogprobQuery, token_logprobs

# Logits held at a time: those of a whole chunk of 2,048 tokens and 150,000 words would take 1.2 GB.
_SLICE_BYTES = 64 * 2**20
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class PromptPlace:
    """A token of the batch whose logits say how likely the prompt's next token is."""

    batch_index: int
    next_position: int
    next_token: int
    collected: PromptLogprobs


@dataclass(frozen=True)
class PromptReader:
    """What one step's batch has to tell about prompts."""

    places: Sequence[PromptPlace]

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledSequence]) -> Self | None:
        """The reader this step wants, if any; the batch holds the sequences' tokens one after the other."""
        places: list[PromptPlace] = []
        first = 0
        for item in scheduled:
            collected = item.sequence.prompt_logprobs
            if collected is not None and not collected.is_complete:
                places += _places(item, collected, first)
            first += item.num_tokens
        return cls(places) if places else None

    def read(self, logits_of: Callable[[Tensor], Tensor], vocab_size: int, device: torch.device) -> None:
        """Hand every place's log-probabilities to those who collect them.

        `logits_of` gives the logits ([n, vocab_size]) of n of the batch's tokens, named by their indices.
        """
        for places in self.chunks(vocab_size):
            logits = logits_of(to_device([place.batch_index for place in places], device))
            tokens = [place.next_token for place in places]
            queries = [LogprobQuery(place.collected.num_top) for place in places]
            for place, found in zip(places, token_logprobs(logits, tokens, queries), strict=True):
                place.collected.record(place.next_position, found)

    def chunks(self, vocab_size: int) -> Iterator[Sequence[PromptPlace]]:
        """As many places at a time as there is memory for their logits."""
        size = max(1, _SLICE_BYTES // (vocab_size * _FLOAT32_BYTES))
        for start in range(0, len(self.places), size):
            yield self.places[start : start + size]


def _places(item: ScheduledSequence, collected: PromptLogprobs, first: int) -> list[PromptPlace]:
    """Those of one sequence, whose tokens in the batch begin at index `first`."""
    sequence, start = item.sequence, item.sequence.num_computed_tokens
    end = min(start + item.num_tokens, collected.num_prompt_tokens - 1)
    return [
        PromptPlace(first + position - start, position + 1, sequence.token_ids[position + 1], collected)
        for position in range(start, end)
    ]
