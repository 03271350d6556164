"""What a request does to its logits before a token is chosen: minimum length, biases, penalties, a grammar."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Self

import numpy
import torch
from torch import Tensor

from ...kernels.sampling import apply_bit_mask, penalize_
from ..request import SamplingParams
from ..structured.thinking_guide import AnyGuide
from ..transfer import to_device


class TokenHistory:
    """The distinct tokens of a sequence from position `first` on, each with how often it is in the output."""

    __slots__ = ("_num_prompt_tokens", "_num_seen", "_place_of", "counts", "tokens")

    def __init__(self, first: int, num_prompt_tokens: int) -> None:
        self._num_seen = first
        self._num_prompt_tokens = num_prompt_tokens
        self._place_of: dict[int, int] = {}
        self.tokens = array("q")
        self.counts = array("q")

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that `token_ids`, the whole sequence, has more than the last time."""
        for position in range(self._num_seen, len(token_ids)):
            token = token_ids[position]
            place = self._place_of.setdefault(token, len(self.tokens))
            if place == len(self.tokens):
                self.tokens.append(token)
                self.counts.append(0)
            self.counts[place] += position >= self._num_prompt_tokens
        self._num_seen = len(token_ids)


class Adjustment:
    """One request's wishes, and what they depend on. Only requests with wishes have one: others cost nothing.

    `guide`, which its owner keeps up to date, knows the tokens that a grammar allows.
    """

    __slots__ = ("_num_prompt_tokens", "guide", "history", "num_output_tokens", "params", "stop_token_ids")

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Sequence[int],
        num_prompt_tokens: int,
        guide: AnyGuide | None = None,
    ) -> None:
        self.params = params
        self.guide = guide
        self.stop_token_ids = tuple(stop_token_ids)
        self.num_output_tokens = 0
        self._num_prompt_tokens = num_prompt_tokens
        # The prompt counts for the repetition penalty alone.
        first = 0 if params.repetition_penalty != 1 else num_prompt_tokens
        self.history = TokenHistory(first, num_prompt_tokens) if params.has_penalties else None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        stop_token_ids: Sequence[int],
        num_prompt_tokens: int,
        guide: AnyGuide | None = None,
    ) -> Self | None:
        """The adjustment these parameters ask for, if any."""
        wanted = params.has_penalties or params.logit_bias or params.min_tokens or guide is not None
        return cls(params, stop_token_ids, num_prompt_tokens, guide) if wanted else None

    @property
    def forbids_stops(self) -> bool:
        """Whether the answer is to go on, being too short. Not where a grammar leaves nothing but stopping."""
        if self.num_output_tokens >= self.params.min_tokens:
            return False
        return self.guide is None or self.guide.allows_other_than(self.stop_token_ids)

    def after(self, token_ids: Sequence[int]) -> Self:
        """Itself, brought up to date with its sequence's tokens (prompt and output)."""
        self.num_output_tokens = len(token_ids) - self._num_prompt_tokens
        if self.history is not None:
            self.history.catch_up(token_ids)
        return self


def adjust_(logits: Tensor, adjustments: Mapping[int, Adjustment]) -> None:
    """Change rows of `logits` ([n, vocab] float32) in place: those named by the keys, each by its adjustment.

    In vLLM's order: stop tokens are masked before `min_tokens`, then biases are added, then penalties taken. What a
    grammar forbids is masked last: nothing of the others changes a logit that is minus infinity.
    """
    _mask_stops(logits, adjustments)
    _add_biases(logits, adjustments)
    _penalize(logits, adjustments)
    _mask_forbidden(logits, adjustments)


def _mask_stops(logits: Tensor, adjustments: Mapping[int, Adjustment]) -> None:
    pairs = [(row, token) for row, each in adjustments.items() if each.forbids_stops for token in each.stop_token_ids]
    if pairs:
        rows, tokens = to_device(pairs, logits.device).unbind(1)
        # A number of the host's would be fetched first, and the host wait for that.
        logits.index_put_((rows, tokens), logits.new_full((), -torch.inf))


def _add_biases(logits: Tensor, adjustments: Mapping[int, Adjustment]) -> None:
    pairs: list[tuple[int, int]] = []
    biases: list[float] = []
    for row, each in adjustments.items():
        if each.params.logit_bias:
            pairs += [(row, token) for token in each.params.logit_bias]
            biases += each.params.logit_bias.values()
    if pairs:
        rows, tokens = to_device(pairs, logits.device).unbind(1)
        logits[rows, tokens] += to_device(biases, logits.device, numpy.float32)


def _penalize(logits: Tensor, adjustments: Mapping[int, Adjustment]) -> None:
    histories = {row: (each.params, each.history) for row, each in adjustments.items() if each.history is not None}
    if not histories:
        return
    lengths = [len(history.tokens) for _, history in histories.values()]

    def of_row(values: Sequence[float], dtype: type) -> Tensor:
        """One value a row, repeated for each of the row's tokens."""
        return to_device(numpy.repeat(values, lengths), logits.device, dtype)

    params = [params for params, _ in histories.values()]
    penalize_(
        logits,
        rows=of_row(list(histories), numpy.int64),
        tokens=_joined([history.tokens for _, history in histories.values()], logits.device),
        counts=_joined([history.counts for _, history in histories.values()], logits.device),
        repetition=of_row([each.repetition_penalty for each in params], numpy.float32),
        presence=of_row([each.presence_penalty for each in params], numpy.float32),
        frequency=of_row([each.frequency_penalty for each in params], numpy.float32),
    )


def _mask_forbidden(logits: Tensor, adjustments: Mapping[int, Adjustment]) -> None:
    guides = {row: each.guide for row, each in adjustments.items() if each.guide is not None}
    if not guides:
        return
    masks = to_device(numpy.stack([guide.mask for guide in guides.values()]), logits.device, numpy.int32)
    if len(guides) == len(logits):
        apply_bit_mask(logits, masks)
        return
    rows = to_device(list(guides), logits.device)
    masked = logits[rows]
    apply_bit_mask(masked, masks)
    logits[rows] = masked


def _joined(arrays: Sequence["array[int]"], device: torch.device) -> Tensor:
    return to_device(numpy.concatenate([numpy.array(each, dtype=numpy.int64) for each in arrays]), device)
