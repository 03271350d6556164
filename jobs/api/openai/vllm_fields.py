"""vLLM's further parameters that nothing here answers to, and the names that it has given up."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic.json_schema import SkipJsonSchema

from ..schemas import Text
from .request_body import Body, Unsupported, only

# The description of the API is to say what can be done with it.
_Untold = SkipJsonSchema[Any]
_Refused = SkipJsonSchema[Unsupported]
_PROMPT_LOGPROBS = "say echo and logprobs at /v1/completions"


class VllmFields(Body):
    """Some clients send all of these. vLLM's default asks for nothing; anything else is refused, not ignored."""

    cache_salt: _Refused = None
    guided_decoding_backend: _Refused = None
    guided_grammar: Annotated[_Untold, AfterValidator(only(instead="say structured_outputs.grammar"))] = None
    guided_json: Annotated[_Untold, AfterValidator(only(instead="say structured_outputs.json"))] = None
    guided_regex: Annotated[_Untold, AfterValidator(only(instead="say structured_outputs.regex"))] = None
    guided_whitespace_pattern: _Refused = None
    length_penalty: Annotated[_Untold, AfterValidator(only(1.0))] = None
    logprob_token_ids: _Refused = None
    priority: Annotated[_Untold, AfterValidator(only(0))] = None
    prompt_logprobs: Annotated[_Untold, AfterValidator(only(instead=_PROMPT_LOGPROBS))] = None
    return_token_ids: Annotated[_Untold, AfterValidator(only(False))] = None
    return_tokens_as_token_ids: Annotated[_Untold, AfterValidator(only(False))] = None
    spaces_between_special_tokens: Annotated[_Untold, AfterValidator(only(True))] = None
    truncate_prompt_tokens: _Refused = None
    use_beam_search: Annotated[_Untold, AfterValidator(only(False))] = None


class VllmChatFields(VllmFields):
    """Those of conversations."""

    add_generation_prompt: Annotated[
        bool | None, Field(description="false: the prompt ends with the last message, and no answer is begun in it")
    ] = None
    add_special_tokens: Annotated[_Untold, AfterValidator(only(False))] = None
    chat_template: _Refused = None
    continue_final_message: Annotated[
        bool | None,
        Field(description="true, with `add_generation_prompt` false: the answer goes on from the last message's text"),
    ] = None
    documents: Annotated[list[dict[Text, Text]] | None, Field(description="What the chat template is told of them")] = (
        None
    )
    echo: Annotated[
        bool | None, Field(description="true: a last message of the assistant's stands in front of the answer")
    ] = None
    include_reasoning: Annotated[
        bool | None,
        Field(description="true: what the model thinks first comes in `reasoning` of its own; false: it is left out"),
    ] = None
    mm_processor_kwargs: Annotated[_Untold, AfterValidator(only({}))] = None
    thinking_token_budget: Annotated[int, Field(ge=0, description="After so many tokens it thinks no more")] | None = (
        None
    )
