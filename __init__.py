"""Headrace: a self-hosted batch processor for LLM prompts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.llm import LLM as LLM
    from .engine.lora_request import LoRARequest as LoRARequest
    from .engine.offline.beam_search import BeamSearchParams as BeamSearchParams
    from .engine.offline.outputs import CompletionOutput as CompletionOutput
    from .engine.offline.outputs import RequestOutput as RequestOutput
    from .engine.sampling_params import SamplingParams as SamplingParams
    from .engine.structured.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from .engine.text.prompts import TextPrompt as TextPrompt
    from .engine.text.prompts import TokensPrompt as TokensPrompt
    from .jobs.client.client import Client as Client

    __version__: str

__all__ = [
    "LLM",
    "BeamSearchParams",
    "Client",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

# Resolved on first use: `LLM` brings torch, which the command line and producers never need.
_HOMES = {
    "LLM": ".engine.llm",
    "BeamSearchParams": ".engine.offline.beam_search",
    "LoRARequest": ".engine.lora_request",
    "CompletionOutput": ".engine.offline.outputs",
    "RequestOutput": ".engine.offline.outputs",
    "SamplingParams": ".engine.sampling_params",
    "StructuredOutputsParams": ".engine.structured.structured_outputs",
    "TextPrompt": ".engine.text.prompts",
    "TokensPrompt": ".engine.text.prompts",
    "Client": ".jobs.client.client",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("headrace")
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
