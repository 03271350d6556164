"""What a request does to its logits before a token is chosen: allowed tokens, biases, penalties, a grammar."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Self

import numpy
import torch
from torch import Tensor

from ...kernels.sampling import apply_bit_mask, penalize_
from ..sampling_params import SamplingParams
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

    `guide`, which its owner keeps up to date, knows the tokens that a grammar allows. `bad_words`: what must not be
    said, in tokens.
    """

    __slots__ = (
        *("_allowed", "_bad_tokens", "_bad_words", "_num_prompt_tokens", "_word_ends"),
        *("guide", "history", "num_output_tokens", "params", "stop_token_ids"),
    )

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Sequence[int],
        num_prompt_tokens: int,
        guide: AnyGuide | None = None,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self.params = params
        self._allowed = frozenset(params.allowed_token_ids or ())
        self._bad_tokens = [word[0] for word in bad_words if len(word) == 1]
        # By the token before the last: few of them may end with the next one.
        self._bad_words: dict[int, list[Sequence[int]]] = {}
        for word in bad_words:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append(word)
        self._word_ends = self._bad_tokens
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
        bad_words: Sequence[Sequence[int]] = (),
    ) -> Self | None:
        """The adjustment these parameters ask for, if any."""
        wanted = params.has_penalties or params.logit_bias or params.min_tokens or params.allowed_token_ids
        is_wanted = wanted or bad_words or guide is not None
        return cls(params, stop_token_ids, num_prompt_tokens, guide, bad_words) if is_wanted else None

    @property
    def forbidden(self) -> Sequence[int]:
        """The tokens that must not come next: what ends the answer while it is too short, or a bad word."""
        return (*self._word_ends, *self.stop_token_ids) if self._forbids_stops else self._word_ends

    @property
    def _forbids_stops(self) -> bool:
        """Whether the answer is to go on, being too short. Not where nothing but stopping is left."""
        if self.num_output_tokens >= self.params.min_tokens:
            return False
        if self._allowed and self._allowed.issubset(self.stop_token_ids):
            return False
        return self.guide is None or self.guide.allows_other_than(self.stop_token_ids)

    def after(self, token_ids: Sequence[int]) -> Self:
        """Itself, brought up to date with its sequence's tokens (prompt and output)."""
        self.num_output_tokens = len(token_ids) - self._num_prompt_tokens
        if self.history is not None:
            self.history.catch_up(token_ids)
        if self._bad_words:
            begun = self._bad_words.get(token_ids[-1], ())
            ends = [word[-1] for word in begun if self._ends_with(word[:-1], token_ids)]
            self._word_ends = [*ends, *self._bad_tokens]
        return self

    def _ends_with(self, tokens: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Whether the answer so far does."""
        first = len(token_ids) - len(tokens)
        return first >= self._num_prompt_tokens and tuple(token_ids[first:]) == tuple(tokens)


def adjust_(logits: Tensor, adjustments: Mapping[int, Adjustment]) -> None:
    """Change rows of `logits` ([n, vocab] float32) in place: those named by the keys, each by its adjustment.

    In vLLM's order: what is not allowed is masked, then what is forbidden, bad words and the stop tokens before
    `min_tokens`, then biases are added, then penalties taken. What a grammar forbids is masked last: nothing of the
    others changes a logit that is minus infinity.
    """
    _keep_allowed(logits, adjustments)
    _mask_given(logits, adjustments)
    _add_biases(logits, adjustments)
    _penalize(logits, adjustments)
    _mask_forbidden(logits, adjustments)


def _keep_allowed(logits: Tensor, adjustments: Mapping[int, Adjustment]) -> None:
    allowed = {row: each.params.allowed_token_ids for row, each in adjustments.items() if each.params.allowed_token_ids}
    if not allowed:
        return
    pairs = [(row, token) for row, tokens in allowed.items() for token in tokens]
    rows, tokens = to_device(pairs, logits.device).unbind(1)
    kept = logits[rows, tokens]
    logits[to_device(list(allowed), logits.device)] = -torch.inf
    logits[rows, tokens] = kept


def _mask_given(logits: Tensor, adjustments: Mapping[int, Adjustment]) -> None:
    pairs = [(row, token) for row, each in adjustments.items() for token in each.forbidden]
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
