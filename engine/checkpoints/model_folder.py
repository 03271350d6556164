"""A Hugging Face model folder's files that say what the model is. Free of torch."""

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError

Raw = dict[str, Any]


def read_json_object(file: Path) -> Raw:
    """What a model folder's JSON file holds. Raises `ModelError` when it is no JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return content


def read_config(folder: Path) -> Raw:
    """What `config.json` holds. Raises `ModelError` where the folder is no model's."""
    if not folder.exists():
        raise ModelError(f"model folder {folder} does not exist")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    return read_json_object(file)


def read_stop_ids(folder: Path, raw: Raw) -> list[Any]:
    """`generation_config.json` may list more stop ids than `config.json`, as chat models do."""
    file = folder / "generation_config.json"
    generation = read_json_object(file) if file.is_file() else {}
    ids: list[Any] = []
    for value in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        ids += value if isinstance(value, list) else [value]
    return [token for token in dict.fromkeys(ids) if token is not None]
