"""Prompts as the offline face is given them, and what the engine wants of them."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, Self, TypedDict, TypeGuard

from ..errors import InvalidRequestError
from ..vision.prompt_images import Picture, PromptImage
from ..vision.reading import ImageReader, has_images
from .chat_ending import ChatEnding
from .messages import check_messages, with_plain_texts
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image


class MultiModalData(TypedDict):
    """The images of a prompt, in their order: opened with Pillow, or as files' bytes."""

    image: "Image | bytes | Sequence[Image | bytes]"


class TokensPrompt(TypedDict):
    """A prompt given as token ids. For each image it has one image token. `prompt`: what they say, for the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[MultiModalData]


class TextPrompt(TypedDict):
    """A prompt given as text. Each image's place is written as the model's template writes it."""

    prompt: str
    multi_modal_data: NotRequired[MultiModalData]


# Token ids may come bare, too.
Prompt = str | TokensPrompt | TextPrompt | Sequence[int]
# One or several. (A bare one alone is taken as well; said here, checkers could not tell what a list is to hold.)
Prompts = str | TokensPrompt | TextPrompt | Sequence[Prompt]
Messages = Sequence[Mapping[str, Any]]


class TokenIds(NamedTuple):
    """A prompt's, twice: as a list of its own, Python's own numbers, and as the engine takes them."""

    listed: list[int]
    packed: "array[int] | list[int]"

    @classmethod
    def of(cls, listed: list[int]) -> Self:
        return cls(listed, listed)


@dataclass(frozen=True)
class ReadPrompt:
    """`text`: None where token ids alone were given."""

    text: str | None
    token_ids: TokenIds
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True)
class _Given:
    """A prompt as it was given: without `token_ids` its text is to be encoded."""

    text: str | None
    token_ids: TokenIds | None
    pictures: Sequence[Picture] = ()

    @classmethod
    def of(cls, prompt: Prompt) -> Self:
        """Raises `InvalidRequestError`."""
        if isinstance(prompt, str):
            return cls(_encodable(prompt), None)
        if isinstance(prompt, list | tuple):
            return cls(None, _token_ids(prompt))
        given: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
        if token_ids is not None:
            return cls(text if isinstance(text, str) else None, _token_ids(token_ids), _pictures(given))
        if isinstance(text, str):
            return cls(_encodable(text), None, _pictures(given))
        raise InvalidRequestError(
            'a prompt must be a text, a list of token ids, or an object with "prompt" or "prompt_token_ids"'
        )


@dataclass(frozen=True)
class InputProcessor:
    """Reads prompts, with vLLM's name. Every method raises `InvalidRequestError` saying what is wrong with a prompt."""

    tokenizer: Tokenizer
    images: ImageReader

    def read(self, prompts: Iterable[Prompt]) -> list[ReadPrompt]:
        """What is wrong is said with the prompt's place among them. Texts are encoded together, on all cores."""
        given = []
        for position, prompt in enumerate(prompts):
            with _naming(position):
                given.append(_Given.of(prompt))
        texts = [(position, each.text or "") for position, each in enumerate(given) if each.token_ids is None]
        encoded: Iterator[list[int]] = iter(())
        if texts:
            with _naming(texts[0][0]):
                encoded = iter(self.tokenizer.encode_batch([text for _, text in texts]))
        read = []
        for position, each in enumerate(given):
            with _naming(position):
                token_ids = TokenIds.of(next(encoded)) if each.token_ids is None else each.token_ids
                read.append(self._with_images(each.text, token_ids, each.pictures))
        return read

    def chats(
        self,
        chats: Sequence[Messages],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        are_thinking: Sequence[bool] | None = None,
        ending: ChatEnding = ChatEnding.ANSWER,
        chat_template: str | None = None,
    ) -> list[ReadPrompt]:
        """The prompts of conversations, through the model's chat template or another, which is told of `tools`.

        `are_thinking`: of each, whether the model is to think before it answers; None: of none.
        """
        for chat in chats:
            check_messages(chat)
        split = [self.images.split(chat) if has_images(chat) else (with_plain_texts(chat), []) for chat in chats]
        texts = [
            _encodable(
                self.tokenizer.apply_chat_template(
                    chat, self.tokenizer.template_kwargs(template_kwargs, thinks), tools, ending, chat_template
                )
            )
            for (chat, _), thinks in zip(split, are_thinking or [False] * len(split), strict=True)
        ]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            self._with_images(text, TokenIds.of(token_ids), pictures)
            for text, token_ids, (_, pictures) in zip(texts, encoded, split, strict=True)
        ]

    def _with_images(self, text: str | None, token_ids: TokenIds, pictures: Sequence[Picture]) -> ReadPrompt:
        if not pictures:
            return ReadPrompt(text, token_ids)
        images = self.images.images(pictures)
        expanded = self.images.expanded(token_ids.listed, [image.grid for image in images])
        return ReadPrompt(text, TokenIds(expanded.tolist(), expanded), images)


@contextmanager
def _naming(position: int) -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(f"prompt {position}: {error}", error.field) from error


def _token_ids(given: Any) -> TokenIds:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"prompt_token_ids must be a list of token ids, not {given!r}", "prompt_token_ids")
    if isinstance(given, list | tuple):
        # Mostly: one look makes numbers of 32 bits of them, and their sum is Python's own only where all of them are.
        # What is wrong with others is said below.
        with suppress(TypeError, OverflowError):
            packed = array("i", given)
            if type(sum(given)) is int:
                return TokenIds([*given], packed)
    try:
        return TokenIds.of([*map(index, given)])
    except TypeError as error:
        raise InvalidRequestError(f"prompt_token_ids: token ids must be whole numbers: {error}") from error


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{text[error.start : error.end]!r} in a prompt is no text: leave it out") from error
    return text


def _pictures(prompt: Mapping[str, Any]) -> Sequence[Picture]:
    data = prompt.get("multi_modal_data") or {}
    if not isinstance(data, Mapping) or not data.keys() <= {"image"}:
        raise InvalidRequestError(
            'multi_modal_data must be {"image": ...}: other kinds are not read', "multi_modal_data"
        )
    given = data.get("image")
    if given is None:
        return ()
    return given if isinstance(given, list | tuple) else (given,)


def is_one(prompts: Prompts) -> TypeGuard[Prompt]:
    """Whether it is a prompt, and not several: a list that begins with a token id is one."""
    if isinstance(prompts, list | tuple):
        return bool(prompts) and isinstance(prompts[0], Integral)
    return isinstance(prompts, str | Mapping)
