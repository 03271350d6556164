"""In which form the calls of tools in a chat's answer are to be expected."""

from ....engine.errors import InvalidRequestError
from ....engine.text.tokenizer import Tokenizer
from ...calls.formats import SPECIAL_TOKENS_HIDE_CALLS, CallFormat
from ...spec.tool_choice import NamedTool
from .chat_schemas import ChatCompletionRequest


def expected_calls(body: ChatCompletionRequest, tokenizer: Tokenizer) -> CallFormat | None:
    """That of answers to `body`; None where no tool may be called.

    Raises `InvalidRequestError` where the model is to decide and its format is none that is known, or would be hidden.
    """
    if isinstance(body.calls, NamedTool):
        return CallFormat("named", body.calls.function.name)
    if body.calls == "none":
        return None
    if body.calls == "required":
        return CallFormat("required")
    most = 1 if body.parallel_tool_calls is False else None
    form = CallFormat.of_model(tokenizer, body.callable_functions, most)
    if form.needs_bare_text and body.skip_special_tokens is False:
        raise InvalidRequestError(f"skip_special_tokens: {SPECIAL_TOKENS_HIDE_CALLS}", "skip_special_tokens")
    if form.kind == "harmony" and body.thinking_token_budget is not None:
        raise InvalidRequestError(
            "thinking_token_budget: the final message follows the thinking then, and a call of a tool is another: "
            'leave it out, or say tool_choice "required", a function or "none"',
            "thinking_token_budget",
        )
    return form
