"""Which text or token has stopped an answer, as vLLM's server tells it."""

from functools import lru_cache

from ..engine.checkpoints.model_config import ModelConfig
from ..engine.request import Request
from ..engine.text.finished_answer import end_token_id, stop_reason
from ..engine.text.tokenizer import Tokenizer
from .outcomes import Answer


def stop_reason_of(tokenizer: Tokenizer, request: Request, answer: Answer) -> str | int | None:
    """None where it was the model's end, a limit, or a choice. Raises `ModelError` where the model is gone."""
    if request.params.choices is not None:
        return None
    return stop_reason(request, answer.token_ids, answer.finish_reason, _end_token_id(tokenizer))


@lru_cache(maxsize=4)
def _end_token_id(tokenizer: Tokenizer) -> int | None:
    return end_token_id(tokenizer, ModelConfig.from_pretrained(tokenizer.folder).eos_token_ids)
