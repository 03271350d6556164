"""Where the prompt of a conversation ends."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from ..errors import InvalidRequestError

# As which its errors are known, and vLLM's option.
CONTINUE = "continue_final_message"
# In no message: characters of Unicode's private use. The space tells whether the template strips a message's end.
_MARK = "\uf8f2headrace\uf8f3"
_MARKED_END = f"{_MARK} "


class ChatEnding(Enum):
    """Where the assistant's answer begins, behind the last message, or within it, so that the answer goes on from it.

    They are what vLLM calls `add_generation_prompt`, neither, and `continue_final_message`.
    """

    ANSWER = "answer"
    LAST_MESSAGE = "last message"
    WITHIN_LAST_MESSAGE = "within the last message"

    @classmethod
    def of(cls, add_generation_prompt: bool, continue_final_message: bool) -> "ChatEnding":
        """Raises `InvalidRequestError` where both are wanted."""
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message goes on with the last message, and add_generation_prompt begins another one: "
                "with it say add_generation_prompt=False",
                CONTINUE,
            )
        if continue_final_message:
            return cls.WITHIN_LAST_MESSAGE
        return cls.ANSWER if add_generation_prompt else cls.LAST_MESSAGE

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages as they are to be rendered for `cut`."""
        if self is not ChatEnding.WITHIN_LAST_MESSAGE:
            return messages
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str) or not content:
            raise InvalidRequestError(f"{CONTINUE} needs a last message whose content is a text", CONTINUE)
        return [*messages[:-1], {**messages[-1], "content": f"{content}{_MARKED_END}"}]

    def cut(self, text: str) -> str:
        """The prompt out of what the template made of marked messages."""
        if self is not ChatEnding.WITHIN_LAST_MESSAGE:
            return text
        before, mark, after = text.rpartition(_MARK)
        if not mark:
            raise InvalidRequestError(
                f"{CONTINUE}: the model's chat template does not write the last message out",
                CONTINUE,
            )
        return before if after.startswith(" ") else before.rstrip()
