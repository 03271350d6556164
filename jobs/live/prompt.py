"""From what a user sends to the tokens of a prompt, in the producer's process. Free of torch."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.checkpoints.hub import locate_model, public_name
from ...engine.checkpoints.model_config import ModelConfig
from ...engine.errors import InvalidRequestError
from ...engine.sampling.defaults import SamplingDefaults, read_sampling_defaults
from ...engine.text.chat_ending import CONTINUE, ChatEnding
from ...engine.text.messages import with_plain_texts
from ...engine.text.tokenizer import Tokenizer
from ...engine.vision.reading import ImageReader, files_of, has_images
from ..errors import SpecError
from ..spec.messages import messages_problem
from ..spec.sampling import SamplingSpec

# They are a hundred bytes each, and Redis gets all of a prompt's in one entry.
MAX_PROMPT_LOGPROBS = 2**18


class ContextLengthExceeded(InvalidRequestError):
    """A prompt that leaves no room for an answer in the model's context."""

    code = "context_length_exceeded"


def length_problem(num_tokens: int | str, context_length: int) -> str:
    """What is told of such a prompt, beginning as other servers' messages do: there are clients that look for it."""
    return (
        f"this model's maximum context length is {context_length} tokens, one of them generated, and the prompt has "
        f"{num_tokens} tokens: shorten it"
    )


class LivePrompt(NamedTuple):
    """The tokens of a prompt, and the files of the images in it, in their order."""

    token_ids: list[int]
    images: tuple[bytes, ...] = ()


class LivePrompts:
    """One model's chat template and tokenizer, for prompts that come one at a time. Thread-safe.

    Every method raises `InvalidRequestError` naming the field at fault.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        """`name`: what users call the model. Raises `ModelError`."""
        config = ModelConfig.from_pretrained(folder)
        self._folder = folder
        self.context_length = config.max_position_embeddings
        self.vocab_size = config.vocab_size
        self.tokenizer = Tokenizer.from_pretrained(folder)
        self._images = ImageReader(config.vision, name or folder.name)

    @cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        """How the model's authors would have it sampled. Raises `ModelError`."""
        return read_sampling_defaults(self._folder)

    @classmethod
    def of(cls, model: str) -> "LivePrompts":
        """Those of a model as `LiveRequest.model` names it; read once in a process. Raises `ModelError`."""
        return _prompts_of(model)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        ending: ChatEnding = ChatEnding.ANSWER,
    ) -> LivePrompt:
        """A conversation, up to where the assistant's answer begins unless `ending` says otherwise.

        `template_kwargs`: what else the model's chat template is told; `tools`: the functions that it shows the model.
        """
        if not self.tokenizer.has_chat_template:
            raise InvalidRequestError("the model has no chat template for messages: send a prompt", "messages")
        problem = messages_problem(messages)
        if problem is not None:
            raise InvalidRequestError(f"messages {problem}", "messages")
        try:
            if has_images(messages):
                return self._illustrated(messages, template_kwargs or {}, tools, ending)
            text = self.tokenizer.apply_chat_template(with_plain_texts(messages), template_kwargs or {}, tools, ending)
        except ContextLengthExceeded:
            raise
        except InvalidRequestError as error:
            field = CONTINUE if error.field == CONTINUE else "messages"
            raise InvalidRequestError(str(error), field) from error
        if not (token_ids := self._encode_chat(text)):
            raise InvalidRequestError("messages must not be empty", "messages")
        return LivePrompt(token_ids)

    def _illustrated(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        ending: ChatEnding,
    ) -> LivePrompt:
        split, pictures = self._images.split(with_plain_texts(messages))
        files = files_of(pictures)
        grids = self._images.grids(files)
        text = self.tokenizer.apply_chat_template(split, template_kwargs, tools, ending)
        token_ids = self._encode_chat(text)
        return LivePrompt(self._images.expanded(token_ids, grids, self._check_length).tolist(), files)

    def text(self, prompt: str) -> list[int]:
        """The tokens of a text to be continued."""
        token_ids = self.encoded(prompt)
        if not token_ids:
            raise InvalidRequestError("prompt is empty", "prompt")
        return token_ids

    def encoded(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of any text that may fit into the context."""
        self._check_size(prompt, "prompt")
        return self.tokenizer.encode(prompt, add_special_tokens)

    def decoded(self, token_ids: Sequence[int]) -> str:
        """The text of a request's `tokens`, special ones included."""
        self._check_vocabulary(token_ids, "tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _encode_chat(self, text: str) -> list[int]:
        self._check_size(text, "messages")
        # A chat template writes the special tokens itself.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingSpec, field: str) -> None:
        """Refuse what the model has no room or no tokens for; raises `ContextLengthExceeded` for the former.

        `field`: where the request has its prompt.

        The worker may serve less than the model's context: it has the last word.
        """
        num_tokens = len(prompt_token_ids)
        self._check_length(num_tokens, field)
        self._check_prompt_logprobs(num_tokens, sampling)
        self._check_vocabulary(prompt_token_ids, "prompt")
        self.tokenizer.encode_bad_words(sampling.bad_words)
        try:
            sampling.check_vocabulary(self.vocab_size)
        except SpecError as error:
            raise InvalidRequestError(str(error), (error.field or "").removeprefix("sampling.") or None) from error

    def _check_vocabulary(self, token_ids: Sequence[int], field: str) -> None:
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"{field}: token id {token} is outside the vocabulary of {self.vocab_size} tokens", field
                )

    def _check_size(self, text: str, field: str) -> None:
        """Refuse a text that is too long however it is tokenized: that takes seconds a megabyte."""
        fewest = self.tokenizer.fewest_tokens(len(text), self.context_length)
        if fewest >= self.context_length:
            raise ContextLengthExceeded(length_problem(f"at least {fewest}", self.context_length), field)

    def _check_length(self, num_tokens: int, field: str = "messages") -> None:
        if num_tokens >= self.context_length:
            raise ContextLengthExceeded(length_problem(num_tokens, self.context_length), field)

    def _check_prompt_logprobs(self, num_tokens: int, sampling: SamplingSpec) -> None:
        num_logprobs = 0 if sampling.prompt_logprobs is None else num_tokens * (1 + sampling.prompt_logprobs)
        if num_logprobs > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"the {num_tokens} tokens of the prompt have {num_logprobs} log-probabilities, more than "
                f"{MAX_PROMPT_LOGPROBS}: ask for fewer of each, or shorten the prompt",
                "prompt_logprobs",
            )


@lru_cache(maxsize=16)
def _prompts_of(model: str) -> LivePrompts:
    located = locate_model(model, with_weights=False)
    return LivePrompts(located.folder, public_name(located.name))
