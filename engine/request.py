"""What goes into the engine and what comes out: requests and events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from .logprobs import TokenLogprobs
from .lora_request import LoRARequest
from .sampling_params import SamplingParams
from .structured.grammar import Grammar
from .structured.reasoning import ReasoningTokens
from .vision.prompt_images import PromptImage

# Told each new token, in the engine's thread; true when it completes a stop. It must be quick and must not raise.
StopChecker = Callable[[int], bool]


class RequestOutputKind(Enum):
    """When the engine tells of a request's tokens, with vLLM's names: of each step's, or of all when it ends."""

    DELTA = 1
    FINAL_ONLY = 2


class FinishReason(StrEnum):
    """Why a request ended, in the OpenAI API's words; `ABORT` and `ERROR` are ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class Request:
    """One prompt for the engine.

    The engine knows no tokenizer, so whoever adds a request brings what depends on texts. `choice_token_ids`: the
    token ids of each of `params.choices`, in order. `stop_checker`, called with each new token, ends the request when
    it says so: the place for `params.stop`, since it sees a stop in the step that completes it, and no token is
    computed in vain. It keeps the state of one run, so a request with one is added once. `grammar`:
    `params.structured_outputs`, compiled. `bad_words_token_ids`: `params.bad_words` in tokens. `reasoning`: between
    which tokens the model thinks, where `params.reasoning`. `logprobs_temperature` divides the logits of which
    `params.logprobs` are reported.

    `priority`: a request of a lower value is served first; of equal ones the earlier. `fork_of` names a request with
    the same prompt: while that one's is not computed yet, this one waits for it and shares its KV blocks. So the
    samples of a prompt cost one prefill, and are requests of their own in everything else.

    `resume_token_ids`: the answer's first tokens where they are known already, from an attempt that was cut short.
    They are computed with the prompt and count as the answer's own in everything (`max_tokens`, penalties, stops, the
    place in the seed's sequence), so that the rest is what the undisturbed run would have given; events bring only
    that. The stop checker is told of them when the request is added. Where they complete the answer already nothing is
    computed. Such a request computes its prompt itself, whatever it is a `fork_of`. With choices, whose answers come
    whole, they are one of the choices, after the thinking where there is one.

    `output_kind`: of an answer that nobody reads before it is complete no step need be told. `Engine.watch` has the
    rest of it told step by step all the same.

    `lora_request`: the LoRA adapter to answer with; its KV blocks are shared among requests with the same one only.
    `cache_salt`: likewise; who does not have it cannot learn, from what is cached, what others have asked.

    `is_conversation`: the next turn is likely to be asked too. Its prompt begins with this one, but for what opens the
    answer here, and of a model whose layers have states one is kept there. That takes this request a step more.

    `images`: those in the prompt, in their order. For each token of each, `Grid.num_tokens`, the prompt has the model's
    image token.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    choice_token_ids: tuple[tuple[int, ...], ...] | None = None
    stop_checker: StopChecker | None = None
    grammar: Grammar | None = None
    logprobs_temperature: float = 1.0
    priority: int = 0
    fork_of: str | None = None
    resume_token_ids: Sequence[int] = ()
    lora_request: LoRARequest | None = None
    images: Sequence[PromptImage] = ()
    output_kind: RequestOutputKind = RequestOutputKind.DELTA
    reasoning: ReasoningTokens | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    cache_salt: str | None = None
    is_conversation: bool = False

    def of_row(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> "Request":
        """The same for another prompt, of a request without a stop checker: a job makes one for each of its rows."""
        assert self.stop_checker is None
        # A copy first: it takes half the time of an update.
        fields = self.__dict__.copy()
        fields["request_id"], fields["prompt_token_ids"], fields["params"] = request_id, prompt_token_ids, params
        other = object.__new__(type(self))
        object.__setattr__(other, "__dict__", fields)
        return other


class RequestEvent(NamedTuple):
    """What one step brought for one request. (A tuple: each step makes as many as it has rows.)

    `new_token_ids` follow those of earlier events. A request that is `FINAL_ONLY` has one event, with all of them. The
    last event has a `finish_reason`; with choices it also has `choice_index` and `choice_probabilities` (in the order
    of the choices, summing to one).
    `logprobs`: where the request asks for them, one mapping of token ids for each new token, its own first.
    `prompt_logprobs`: likewise, one for each token of the prompt, None for its first; the first event has them.
    `num_cached_tokens`: prompt tokens whose KV was found in the prefix cache, or computed for a request with the same
    prompt. `error`: what went wrong, in one line, where the `finish_reason` is `ERROR`. `is_invalid`: it is the
    request's own fault, so that to try it again is no use.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    choice_index: int | None = None
    choice_probabilities: tuple[float, ...] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None
    is_invalid: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
