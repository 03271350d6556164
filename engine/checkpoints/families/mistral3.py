"""The `config.json` of Mistrals that read images, as their reader finds it. Free of torch."""

from pathlib import Path

from ..model_folder import Raw
from ..model_shape import ModelShape
from .deepseek import read_mistral4
from .llama import read_ministral3, read_mistral
from .others import read_language_model

_DECODERS = {"mistral": read_mistral, "ministral3": read_ministral3, "mistral4": read_mistral4}


def read_mistral3(folder: Path, raw: Raw) -> ModelShape:
    """The decoder of Mistral Small 3.1 and later and Ministral 3: for text it is a model like others."""
    return read_language_model(folder, raw, _DECODERS, {})
