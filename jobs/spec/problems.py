"""What is wrong with what users send, in our words."""

import re
from collections.abc import Mapping
from typing import Any

from ...engine.errors import shown
from ...storage.errors import Argument

# Where our own messages name another argument than their own.
_SECOND = re.compile(
    r"(?:(?<=meaning with )|(?<=1 with )|(?<=meaning without )|(?<=: give )|(?<=, and a ))"
    r"(choices|temperature|reasoning|logprobs|n)\b"
)
# A longer text is not repeated in the message about it.
_SHORT = 40


def problem(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors in our words: what is allowed, and what was given."""
    if error["type"] == "extra_forbidden":
        return "there is no such option"
    if error["type"] == "model_attributes_type":
        # Pydantic speaks of Python's objects and their attributes.
        return "Input should be an object with fields"
    message, given = str(error["msg"]).removeprefix("Value error, "), error["input"]
    if isinstance(given, str):
        # Of a text that was looked at before, pydantic counts the items.
        message = message.replace("items after validation", "characters")
    # What a user gives as a list is kept as a tuple.
    message = message.replace(" after validation", "").replace("a valid tuple", "a valid list")
    is_short = isinstance(given, bool | int | float) or (isinstance(given, str) and len(given) <= _SHORT)
    # That a flag is set says nothing more, but where a text was wanted.
    says_more = given is not True or error["type"] == "string_type"
    return f"{message}, not {shown(given)}" if is_short and says_more else message


def with_arguments(text: str) -> list[str | Argument]:
    """A message that may name a second argument by a word that is one of the language too."""
    return [Argument(part) if index % 2 else part for index, part in enumerate(_SECOND.split(text))]
