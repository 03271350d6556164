"""A model's chat templates, by the names that `transformers` has given them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.model_folder import TEMPLATES_FOLDER
from ..errors import ModelError


def read_template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Those of a folder's files, which go before what its `tokenizer_config.json`, `config`, says.

    The one of most conversations is called "default". Raises `ModelError` for one that is no text.
    """
    further = sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))
    files = {file.stem: file for file in further} | {"default": folder / "chat_template.jinja"}
    named = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return named if "default" in named else _configured(folder, config) | named


def _configured(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    source = config.get("chat_template")
    if source is None:
        return {}
    entries = source if isinstance(source, list) else [{"name": "default", "template": source}]
    named = {}
    for entry in entries:
        text = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise ModelError(f"model {folder} has a malformed chat template: it must be a text, not {text!r}")
        named[str(entry.get("name"))] = text
    return named
