"""Between which tokens a model thinks, as its vocabulary and its chat template show it."""

from tokenizers import Tokenizer as FastTokenizer

from ..structured import harmony
from ..structured.harmony import HarmonyTokens
from ..structured.reasoning import MARKERS, ReasoningTokens
from .chat_templates import ChatTemplates


def thinking_tokens(fast: FastTokenizer, templates: ChatTemplates) -> ReasoningTokens | None:
    """None of a model that does not think, or not in a known way."""
    return _harmony_tokens(fast, templates) or _marked(fast, templates)


def _harmony_tokens(fast: FastTokenizer, templates: ChatTemplates) -> HarmonyTokens | None:
    names = (harmony.CHANNEL, harmony.END, harmony.MESSAGE, harmony.START)
    channel, end, message, start = (fast.token_to_id(name) for name in names)
    is_told = templates.source is None or harmony.CHANNEL in templates.source
    if not is_told or channel is None or end is None or message is None or start is None:
        return None
    role, thought, answer, recipient = (
        tuple(fast.encode(text, add_special_tokens=False).ids)
        for text in (harmony.ROLE, harmony.THOUGHT, harmony.ANSWER, harmony.RECIPIENT)
    )
    return HarmonyTokens(
        channel,
        end,
        message_token_id=message,
        begin_token_id=start,
        role_token_ids=role,
        thought_token_ids=thought,
        answer_token_ids=answer,
        recipient_token_ids=recipient,
    )


def _marked(fast: FastTokenizer, templates: ChatTemplates) -> ReasoningTokens | None:
    for markers in MARKERS:
        # Vocabularies have them too whose models do not think, as Qwen3's later instructed ones.
        if templates.source is not None and not templates.think_between(markers):
            continue
        start_id, end_id = fast.token_to_id(markers.start), fast.token_to_id(markers.end)
        if start_id is not None and end_id is not None:
            switch_id = fast.token_to_id(markers.switch) if markers.switch else None
            breaks, label = (_written(fast, text) for text in (markers.line_breaks, markers.label))
            return ReasoningTokens(start_id, end_id, breaks, label, switch_id)
    return None


def _written(fast: FastTokenizer, text: str) -> tuple[int, ...]:
    """The text's tokens; none where the vocabulary cannot write it."""
    token_ids = fast.encode(text, add_special_tokens=False).ids if text else []
    return tuple(token_ids) if fast.decode(token_ids) == text else ()
