"""What in a request depends on texts: the engine knows no tokenizer, so whoever asks brings it."""

from typing import TypedDict

from ..sampling_params import SamplingParams
from ..structured.grammar import Grammar
from ..structured.reasoning import ReasoningTokens
from .tokenizer import Tokenizer


class TextFields(TypedDict):
    """A `Request`'s, by their names there. A stop checker is not among them: it keeps the state of one run."""

    choice_token_ids: tuple[tuple[int, ...], ...] | None
    grammar: Grammar | None
    reasoning: ReasoningTokens | None
    bad_words_token_ids: tuple[tuple[int, ...], ...]


def text_fields(
    tokenizer: Tokenizer, params: SamplingParams, choice_token_ids: tuple[tuple[int, ...], ...] | None = None
) -> TextFields:
    """`choice_token_ids`: those of `params.choices` where they are known already. Raises `InvalidRequestError`."""
    if choice_token_ids is None and params.choices:
        choice_token_ids = tokenizer.encode_choices(params.choices)
    return {
        "choice_token_ids": choice_token_ids,
        "grammar": tokenizer.grammar(params.structured_outputs),
        "reasoning": tokenizer.reasoning(params.reasoning),
        "bad_words_token_ids": tokenizer.encode_bad_words(params.bad_words or ()),
    }
