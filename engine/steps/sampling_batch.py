"""Whose tokens are drawn from a step's logits, and how."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from functools import cached_property, partial
from itertools import count, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from ..sampling.sampler import LogprobQuery, PlainSampling, SampleRow, launch_sample
from ..sampling_params import SamplingParams
from ..scheduling.sequence import Sequence
from ..serving.served_request import ServedRequest
from ..transfer import to_device
from .answer_rows import AnswerRows


class SampledRow(NamedTuple):
    """A row of the logits, and whose token is drawn from it. `leader`: from whose prompt it is the follower's.

    `num_guessed`: how many guesses lie between the sequence's tokens and this one.
    """

    row: int
    served: ServedRequest
    sequence: Sequence
    leader: ServedRequest | None = None
    num_guessed: int = 0


# As the class itself does, without looking at names and defaults.
_as_row = partial(tuple.__new__, SampledRow)


class SamplingBatch:
    """One row of the logits for each of `ended`; from a prompt's row its followers draw their first tokens too.

    A sequence is there once for its last token, and once more for each token of its draft.

    `served`, `sequences`: who draws; `scored`: the rows that are a choice's; `asked`: which of those that draw want
    log-probabilities.
    `is_plain`: each row is sampled once, by parameters that do not depend on what was said. Then the batch may serve
    further steps of the same sequences, brought forward by `advance`.
    """

    def __init__(self, ended: list[Sequence], requests: Mapping[str, ServedRequest], device: torch.device) -> None:
        self.ended = ended
        self.scored = [(row, sequence) for row, sequence in enumerate(ended) if sequence.choice_node is not None]
        served = [requests[each.request_id] for each in ended]
        # Mostly every row is sampled once, for itself: no copy then.
        is_once = not (self.scored or any(each.followers for each in served) or len(set(ended)) < len(ended))
        self._sampled = None if is_once else _sampled_rows(served, ended)
        self._index, self.served, self.sequences = None, served, ended
        if self._sampled is not None:
            self._index = to_device([each.row for each in self._sampled], device)
            self.served = [each.served for each in self._sampled]
            self.sequences = [each.sequence for each in self._sampled]
        params = [each.request.params for each in self.served]
        self.asked = [row for row, each in enumerate(params) if each.logprobs is not None]
        is_adjusted = any(each.adjustment is not None for each in self.served)
        self.is_plain = is_once and not is_adjusted
        self._rows = [_sample_row(each) for each in self.sampled] if is_adjusted else []
        self._plain = None if is_adjusted else self._plain_sampling(params, device)
        # How many more tokens than the first step's the answers may have.
        self._num_left = [
            served.max_tokens - len(sequence.token_ids) - sequence.num_unread_tokens + sequence.num_prompt_tokens - 1
            for served, sequence in zip(self.served, self.sequences, strict=True)
        ]
        self._least_left = min(self._num_left, default=0)
        self._num_advanced = 0

    def advance(self) -> None:
        """Every sequence was sampled, and is to be again."""
        assert self.is_plain
        assert self._plain is not None
        self._plain.advance()
        self._num_advanced += 1

    @cached_property
    def answers(self) -> AnswerRows:
        """Of a plain batch, as they stand before its first step is read."""
        return AnswerRows(self.served)

    @cached_property
    def sampled(self) -> list[SampledRow]:
        """Each that draws, with what there is to say of it. Mostly nobody asks."""
        return _once_each(self.served, self.sequences) if self._sampled is None else self._sampled

    def sample(self, logits: Tensor, likeliest: Tensor) -> tuple[Tensor, Tensor]:
        """The logits that tokens are drawn from, a row a token, and the tokens: of rows that are not finite, some."""
        if self._index is not None:
            logits, likeliest = logits[self._index], likeliest[self._index]
        if self._plain is not None:
            tokens = self._plain.sample(logits, likeliest)
        else:
            tokens = launch_sample(logits, self._rows, likeliest)
        return logits, tokens

    def next_rows(self) -> Mapping[Sequence, int] | None:
        """Which sequences may go on with the tokens before they are read, and their rows; None where nothing may.

        So it is where a choice is scored, where a prompt is shared with followers, and where a next token is masked,
        biased or penalised by what was said before.
        """
        if self.is_plain and self._least_left > self._num_advanced:
            return self._all_rows
        # One that is sure to be its answer's last is followed by nothing.
        rows = [row for row, num_left in enumerate(self._num_left) if num_left > self._num_advanced]
        if not self.is_plain:
            if self.scored or any(each.leader is not None for each in self._sampled or ()):
                return None
            if any(self.served[row].adjustment is not None for row in rows):
                return None
        return {self.sequences[row]: row for row in rows}

    @cached_property
    def _all_rows(self) -> Mapping[Sequence, int]:
        return {sequence: row for row, sequence in enumerate(self.sequences)}

    def _plain_sampling(self, params: SequenceOf[SamplingParams], device: torch.device) -> PlainSampling:
        rows = [row for row, each in enumerate(params) if not each.is_greedy]
        drawn = [_sample_row(self.sampled[row]) for row in rows]
        return PlainSampling(len(params), rows, drawn, device)

    @property
    def queries(self) -> list[LogprobQuery]:
        """What is asked for by each of `asked`."""
        requests = [self.served[index].request for index in self.asked]
        return [LogprobQuery(each.params.logprobs or 0, each.logprobs_temperature) for each in requests]


def _once_each(served: SequenceOf[ServedRequest], ended: SequenceOf[Sequence]) -> list[SampledRow]:
    return list(map(_as_row, zip(count(), served, ended, repeat(None), repeat(0), strict=False)))


def _sampled_rows(served: SequenceOf[ServedRequest], ended: SequenceOf[Sequence]) -> list[SampledRow]:
    sampled = []
    num_guessed = 0
    for row, (request, sequence) in enumerate(zip(served, ended, strict=True)):
        if sequence.choice_node is not None:
            continue
        num_guessed = num_guessed + 1 if row and ended[row - 1] is sequence else 0
        sampled.append(SampledRow(row, request, sequence, None, num_guessed))
        sampled += [SampledRow(row, each, each.sequences[0], request) for each in request.followers]
    return sampled


def _sample_row(sampled: SampledRow) -> SampleRow:
    _, served, sequence, _, num_guessed = sampled
    adjustment = served.adjustment and served.adjustment.after(sequence.token_ids)
    counter = sequence.num_tokens - sequence.num_prompt_tokens + num_guessed
    return SampleRow(served.request.params, served.seed, counter, adjustment)
