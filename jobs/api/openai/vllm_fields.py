"""vLLM's further parameters that nothing here answers to, and the names that it has given up."""

from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic.json_schema import SkipJsonSchema

from .body import Body, Unsupported, only

# The description of the API is to say what can be done with it.
_UNTOLD: Any = SkipJsonSchema()  # type: ignore[type-arg]
_PROMPT_LOGPROBS = "say echo and logprobs at /v1/completions"


class VllmFields(Body):
    """Some clients send all of these. vLLM's default asks for nothing; anything else is refused, not ignored."""

    allowed_token_ids: Annotated[Unsupported, _UNTOLD] = None
    bad_words: Annotated[Any, _UNTOLD, AfterValidator(only([]))] = None
    cache_salt: Annotated[Unsupported, _UNTOLD] = None
    guided_decoding_backend: Annotated[Unsupported, _UNTOLD] = None
    guided_grammar: Annotated[Any, _UNTOLD, AfterValidator(only(instead="say structured_outputs.grammar"))] = None
    guided_json: Annotated[Any, _UNTOLD, AfterValidator(only(instead="say structured_outputs.json"))] = None
    guided_regex: Annotated[Any, _UNTOLD, AfterValidator(only(instead="say structured_outputs.regex"))] = None
    guided_whitespace_pattern: Annotated[Unsupported, _UNTOLD] = None
    include_stop_str_in_output: Annotated[Any, _UNTOLD, AfterValidator(only(False))] = None
    length_penalty: Annotated[Any, _UNTOLD, AfterValidator(only(1.0))] = None
    logprob_token_ids: Annotated[Unsupported, _UNTOLD] = None
    priority: Annotated[Any, _UNTOLD, AfterValidator(only(0))] = None
    prompt_logprobs: Annotated[Any, _UNTOLD, AfterValidator(only(instead=_PROMPT_LOGPROBS))] = None
    return_token_ids: Annotated[Any, _UNTOLD, AfterValidator(only(False))] = None
    return_tokens_as_token_ids: Annotated[Any, _UNTOLD, AfterValidator(only(False))] = None
    skip_special_tokens: Annotated[Any, _UNTOLD, AfterValidator(only(True))] = None
    spaces_between_special_tokens: Annotated[Any, _UNTOLD, AfterValidator(only(True))] = None
    truncate_prompt_tokens: Annotated[Unsupported, _UNTOLD] = None
    use_beam_search: Annotated[Any, _UNTOLD, AfterValidator(only(False))] = None


class VllmChatFields(VllmFields):
    """Those of conversations."""

    add_generation_prompt: Annotated[Any, _UNTOLD, AfterValidator(only(True))] = None
    add_special_tokens: Annotated[Any, _UNTOLD, AfterValidator(only(False))] = None
    chat_template: Annotated[Unsupported, _UNTOLD] = None
    chat_template_kwargs: Annotated[Any, _UNTOLD, AfterValidator(only({}))] = None
    continue_final_message: Annotated[Any, _UNTOLD, AfterValidator(only(False))] = None
    documents: Annotated[Any, _UNTOLD, AfterValidator(only([]))] = None
    echo: Annotated[Any, _UNTOLD, AfterValidator(only(False))] = None
    include_reasoning: Annotated[Any, _UNTOLD, AfterValidator(only(True))] = None
    mm_processor_kwargs: Annotated[Any, _UNTOLD, AfterValidator(only({}))] = None
