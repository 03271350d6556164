"""How tokens are chosen, as a request says it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from numbers import Integral, Real
from typing import TypeGuard

from .errors import InvalidRequestError, shown
from .structured.structured_outputs import StructuredOutputsParams, as_choices


def derived_seed(name: str) -> int:
    """The seed in [0, 2**63) of whatever has this name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; the names and defaults are vLLM's.

    `temperature=0` is greedy. `top_k=0`, or -1, keeps the whole vocabulary. `max_tokens=None` means up to the model's
    context. `seed` makes a sample repeatable whatever else is in the batch; without one, or with -1, the engine derives
    a seed from its own and the request id. `n` answers a prompt that many times; the first is the answer that `n=1`
    gives. `choices` restricts the answer to one of the given texts and reports the probability of each.

    `repetition_penalty` counts the tokens of prompt and output, `presence_penalty` and `frequency_penalty` those of
    the output. `logit_bias` maps token ids to what is added to their logits. An answer is made of
    `allowed_token_ids` alone, and of `bad_words` has none: of each the last token does not follow those before it, be
    it with a space in front or without. `stop`: the answer ends where one of
    these texts appears, and before it unless `include_stop_str_in_output`. Up to `min_tokens` tokens neither the end
    token nor a stop ends an answer. `logprobs=k` reports, for each token, its log-probability and those of the k
    likeliest, or with -1 of all, as the model gives them before any of the above; `prompt_logprobs=k` does for the
    prompt's tokens. Such a prompt is computed afresh, as what the prefix cache holds comes without them. An answer's
    text leaves special tokens out unless `skip_special_tokens=False`; with `detokenize=False` it is empty.
    `structured_outputs`: the answer follows a grammar. It ends where the grammar leaves nothing to say, whatever
    `min_tokens`; where `max_tokens` end it before that, its finish reason is "length".

    `reasoning`: the model thinks before it answers; `choices`, `structured_outputs` and `stop` are about what it says
    then. After `thinking_token_budget` tokens the thinking is ended; `max_tokens` counts both, except that with
    choices they bound the thinking, which is followed by a choice in any case.

    Raises `InvalidRequestError` naming the field that is out of range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    choices: Sequence[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    reasoning: bool = False
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        self._read_other_names()
        self._read_lists()
        self._check_types()
        _require(self.n >= 1, "n", "≥ 1", self.n)
        _require(self.n == 1 or not self.is_greedy, "n", "1 with temperature 0 (all answers would be equal)", self.n)
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]", self.presence_penalty)
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        _require(0 < self.repetition_penalty < math.inf, "repetition_penalty", "> 0", self.repetition_penalty)
        _require(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "≥ 0", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(self.top_k >= -1, "top_k", "≥ 0 (0 keeps all, and so does -1)", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", "in [0, 2**63)", self.seed)
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "≥ 1", self.max_tokens)
        most = math.inf if self.max_tokens is None else self.max_tokens
        _require(0 <= self.min_tokens <= most, "min_tokens", "≥ 0 and at most max_tokens", self.min_tokens)
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", "≥ 0", self.logprobs)
        at_prompt = self.prompt_logprobs
        _require(at_prompt is None or at_prompt >= 0, "prompt_logprobs", "≥ 0", at_prompt)
        budget = self.thinking_token_budget
        _require(budget is None or budget >= 0, "thinking_token_budget", "≥ 0", budget)
        if budget is not None and not self.reasoning:
            raise InvalidRequestError("thinking_token_budget has no meaning without reasoning", "thinking_token_budget")
        _check_logit_bias(self.logit_bias)
        _check_stop(self.stop)
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        self._check_words()
        self._check_structured_outputs()
        if self.stop_strings and not self.detokenize:
            raise InvalidRequestError("stop needs the text: leave out detokenize=False", "detokenize")
        if self.choices is not None:
            _check_choices(self.choices)
            self._check_fits_choices()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def holds_answer(self) -> bool:
        """Whether the answer is held to choices or a grammar."""
        return self.choices is not None or self.structured_outputs is not None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def of_sample(self, index: int) -> "SamplingParams":
        """The parameters of one of the `n` samples, with a seed of its own."""
        if self.n == 1:
            return self
        if index == 0:
            return replace(self, n=1)
        # The prompt is the same for all: once is enough.
        if self.seed is None:
            return replace(self, n=1, prompt_logprobs=None)
        return replace(self, n=1, prompt_logprobs=None, seed=derived_seed(f"{self.seed}/{index}"))

    def with_seed(self, seed: int) -> "SamplingParams":
        """The same with this seed, in [0, 2**63); nothing is checked again, as a job does it for each of its rows."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, seed=seed)
        return other

    def _read_other_names(self) -> None:
        """vLLM has numbers that mean all, or none."""
        for name, said, meant in _OTHER_NAMES:
            value = getattr(self, name)
            if type(value) is type(said) and value == said:
                object.__setattr__(self, name, meant)

    def _read_lists(self) -> None:
        """Arrays, columns of tables and sets are lists too, if they are given as such."""
        for name in _LISTS:
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, Sequence | Mapping | type):
                object.__setattr__(self, name, tuple(value))
        object.__setattr__(self, "choices", as_choices(self.choices))

    def _check_types(self) -> None:
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"):
            _require(_is_number(getattr(self, name)), name, "a number", getattr(self, name))
        for name in ("n", "top_k", "min_tokens"):
            _require(_is_whole(getattr(self, name)), name, "a whole number", getattr(self, name))
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs", "thinking_token_budget"):
            value = getattr(self, name)
            _require(value is None or _is_whole(value), name, "a whole number", value)
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens", "reasoning"):
            _require(isinstance(getattr(self, name), bool), name, "true or false", getattr(self, name))

    def _check_words(self) -> None:
        allowed, bad = self.allowed_token_ids, self.bad_words
        if allowed is not None:
            _check_token_ids("allowed_token_ids", allowed)
            _require(bool(allowed), "allowed_token_ids", "a list with a token id, at least", allowed)
        if bad is not None:
            fits = isinstance(bad, Sequence) and not isinstance(bad, str) and all(isinstance(each, str) for each in bad)
            _require(fits, "bad_words", "a list of texts", bad)
            _require(all(each.strip() for each in bad), "bad_words", "without an empty text", bad)
        # What a grammar leaves they might take away, and then nothing could follow.
        for name, given in (("allowed_token_ids", allowed), ("bad_words", bad)):
            if given and self.structured_outputs is not None:
                raise InvalidRequestError(f"{name} cannot be held to beside structured_outputs: leave out one", name)
        if allowed is not None and self.reasoning:
            raise InvalidRequestError(
                "allowed_token_ids would bind the reasoning too: leave out one of the two", "allowed_token_ids"
            )

    def _check_structured_outputs(self) -> None:
        given = self.structured_outputs
        fits = given is None or isinstance(given, StructuredOutputsParams)
        _require(fits, "structured_outputs", "a StructuredOutputsParams", given)
        if given is not None and self.ignore_eos:
            raise InvalidRequestError("ignore_eos has no meaning with structured_outputs: leave it out", "ignore_eos")

    def _check_fits_choices(self) -> None:
        """Refuse what a choice among whole texts has no use for, rather than ignore it."""
        for name in _NOT_WITH_CHOICES:
            if getattr(self, name) not in (type(self).__dataclass_fields__[name].default, (), {}):
                raise InvalidRequestError(f"{name} has no meaning with choices: leave out one of the two", name)


# More than any vocabulary has.
_ALL = 2**31 - 1
_OTHER_NAMES: tuple[tuple[str, int | None, int | tuple[int, ...] | None], ...] = (
    ("top_k", -1, 0),
    ("seed", -1, None),
    ("logprobs", -1, _ALL),
    ("prompt_logprobs", -1, _ALL),
    ("stop_token_ids", None, ()),
)
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "choices")
_NOT_WITH_CHOICES = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "detokenize",
    "skip_special_tokens",
    "structured_outputs",
)


def _require(holds: bool, name: str, expected: str, value: object) -> None:
    if not holds:
        raise _unfit(name, expected, shown(value))


def _unfit(name: str, expected: str, given: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {expected}, not {given}", name)


def _is_number(value: object) -> TypeGuard[float]:
    """Python counts true and false among the numbers; here they are a mistake, as is what no float can be."""
    # Mostly: the others are asked for in a way that takes ten times as long.
    if type(value) is float:
        return True
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_token_id(value: object) -> bool:
    return _is_whole(value) and value >= 0


def _check_logit_bias(logit_bias: Mapping[int, float] | None) -> None:
    """Of the token ids only that they may be such: the engine knows the vocabulary."""
    if logit_bias is None:
        return
    expected = "a mapping of token ids to numbers"
    _require(isinstance(logit_bias, Mapping), "logit_bias", expected, logit_bias)
    for token, bias in logit_bias.items():
        if not _is_token_id(token):
            raise _unfit("logit_bias", expected, f"keyed by {shown(token)}")
        if not (_is_number(bias) and -100 <= bias <= 100):
            raise _unfit("logit_bias", "in [-100, 100]", f"{shown(bias)} (token {shown(token)})")


def _check_stop(stop: str | Sequence[str] | None) -> None:
    texts = (stop,) if isinstance(stop, str) else () if stop is None else stop
    fits = isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
    _require(fits, "stop", "a text or a list of texts", stop)
    _require(all(texts), "stop", "without an empty text", stop)


def _check_token_ids(name: str, token_ids: Sequence[int]) -> None:
    """As of biases: what the engine needs no model to know."""
    fits = isinstance(token_ids, Sequence) and all(map(_is_token_id, token_ids))
    _require(fits, name, "a list of token ids", token_ids)


def _check_choices(choices: Sequence[str]) -> None:
    fits = isinstance(choices, Sequence) and not isinstance(choices, str)
    fits = fits and bool(choices) and all(isinstance(choice, str) for choice in choices)
    _require(fits, "choices", "a non-empty list of texts", choices)
    if not all(choices):
        raise InvalidRequestError("choices must not hold an empty text", "choices")
    if len(set(choices)) != len(choices):
        choice, times = Counter(choices).most_common(1)[0]
        problem = f"choices must be different from each other: {shown(choice)} is there {times} times"
        raise InvalidRequestError(problem, "choices")
