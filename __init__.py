"""Headrace: a self-hosted batch processor for LLM prompts."""

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.llm import LLM as LLM
    from .engine.lora_request import LoRARequest as LoRARequest
    from .engine.request import SamplingParams as SamplingParams
    from .jobs.client.client import Client as Client

    __version__: str

__all__ = ["LLM", "Client", "LoRARequest", "SamplingParams", "__version__"]

# Resolved on first use: `LLM` brings torch, which the command line and producers never need.
_HOMES = {
    "LLM": ".engine.llm",
    "LoRARequest": ".engine.lora_request",
    "SamplingParams": ".engine.request",
    "Client": ".jobs.client.client",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version("headrace")
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
