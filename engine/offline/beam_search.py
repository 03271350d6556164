"""Beam search: the likeliest answers as a whole, not token by token. Free of torch."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from ..errors import InvalidRequestError
from ..logprobs import TokenLogprobs
from ..request import FinishReason


@dataclass(frozen=True)
class BeamSearchParams:
    """vLLM's names and defaults.

    An answer's score is the sum of its tokens' log-probabilities divided by its length (without the prompt, with the
    end token) to the power of `length_penalty`: above 0 favours long answers, below 0 short ones. A `temperature`
    above 0 divides the logits first. With `ignore_eos` every answer has `max_tokens`.

    Raises `InvalidRequestError` naming the field that is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise InvalidRequestError(f"{name} must be a whole number ≥ 1, not {value!r}", name)
        for name in ("temperature", "length_penalty"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not math.isfinite(value):
                raise InvalidRequestError(f"{name} must be a finite number, not {value!r}", name)
        if not -10 <= self.length_penalty <= 10:
            raise InvalidRequestError(
                f"length_penalty must be in [-10, 10], not {self.length_penalty}", "length_penalty"
            )
        if self.temperature < 0:
            raise InvalidRequestError(f"temperature must be ≥ 0, not {self.temperature}", "temperature")


@dataclass(frozen=True)
class BeamSearchSequence:
    """One answer, with vLLM's names: `tokens` and `text` begin with the prompt, `logprobs` has what each step offered.

    `cum_logprob` is the sum of the answer's log-probabilities.
    """

    tokens: list[int]
    logprobs: Sequence[TokenLogprobs]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """A prompt's answers, the best first; `beam_width` of them unless fewer were found."""

    sequences: list[BeamSearchSequence]


@dataclass
class BeamSearch:
    """The search for one prompt. `beams` are the answers to be continued, the likeliest first.

    The same as transformers' with `early_stopping="never"`: an answer counts as finished when its end token comes
    among the `beam_width` likeliest continuations of its step, and the search goes on for as long as one of the
    `beam_width` best finished answers could still be beaten.
    """

    prompt: Sequence[int]
    params: BeamSearchParams
    end_token_ids: Collection[int]
    max_tokens: int
    beams: list[BeamSearchSequence] = field(init=False)
    _finished: list[BeamSearchSequence] = field(default_factory=list)
    _num_steps: int = 0

    def __post_init__(self) -> None:
        self.beams = [BeamSearchSequence(list(self.prompt), [])]
        if self.params.ignore_eos:
            self.end_token_ids = ()

    @property
    def num_candidates(self) -> int:
        """How many continuations of each beam suffice: were all end tokens among the best, enough would remain."""
        return (1 + max(1, len(self.end_token_ids))) * self.params.beam_width

    @property
    def best(self) -> list[BeamSearchSequence]:
        """The finished answers, the best first."""
        return self._finished

    def advance(self, offered: Sequence[TokenLogprobs]) -> None:
        """Continue the beams, given for each the `num_candidates` likeliest next tokens. At the end none remains."""
        self._num_steps += 1
        width = self.params.beam_width
        candidates = sorted(self._continuations(offered), key=lambda candidate: -candidate.cum_logprob)
        running = [candidate for candidate in candidates if candidate.finish_reason is None]
        ended = [candidate for candidate in candidates[:width] if candidate.finish_reason is not None]
        # Stable: of equally good answers the one found first stays first.
        self._finished = sorted(self._finished + ended, key=self.score, reverse=True)[:width]
        self.beams = running[:width] if self._can_improve(running) else []

    def score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - len(self.prompt)
        return beam.cum_logprob / math.pow(length, self.params.length_penalty)

    def _continuations(self, offered: Sequence[TokenLogprobs]) -> list[BeamSearchSequence]:
        return [
            BeamSearchSequence(
                tokens=[*beam.tokens, token],
                logprobs=[*beam.logprobs, tokens],
                cum_logprob=beam.cum_logprob + logprob.logprob,
                finish_reason=self._finish_reason(token),
            )
            for beam, tokens in zip(self.beams, offered, strict=True)
            for token, logprob in tokens.items()
        ]

    def _finish_reason(self, token: int) -> FinishReason | None:
        if token in self.end_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._num_steps == self.max_tokens else None

    def _can_improve(self, running: Sequence[BeamSearchSequence]) -> bool:
        """Whether the likeliest running answer may yet beat the worst of enough finished ones."""
        if not running or len(self._finished) < self.params.beam_width:
            return bool(running)
        penalty = self.params.length_penalty
        # More tokens only make it less likely, and with a positive penalty only the longest is divided by most.
        length = self.max_tokens if penalty > 0 else self._num_steps
        return running[0].cum_logprob / math.pow(length, penalty) > self.score(self._finished[-1])
