"""What a model's files say it is: a Hugging Face folder's, or a GGUF file's metadata. Free of torch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .gguf.config import read_gguf_config
from .gguf.file import is_gguf
from .scalars import whole, wholes

Raw = dict[str, Any]
# Where a folder has further chat templates, each in a file that is called after it.
TEMPLATES_FOLDER = "additional_chat_templates"


class FileError(ModelError):
    """Says already which of a model's files is at fault."""


@contextmanager
def at_fault(file: Path) -> Iterator[None]:
    """Name the file in errors about what it holds."""
    try:
        yield
    except FileError:
        raise
    except ModelError as error:
        raise FileError(f"{file}: {error}") from error


def read_json_object(file: Path) -> Raw:
    """What a model folder's JSON file holds. Raises `ModelError` when it is no JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise FileError(f"{file} must hold a JSON object")
    return content


def config_file(model: Path) -> Path:
    """The file that says what a model is: `config.json` in its folder, or the GGUF file itself."""
    return model if is_gguf(model) else model / "config.json"


def read_config(folder: Path) -> Raw:
    """What `config.json` holds, or a GGUF file would have it hold. Raises `ModelError` where there is no model."""
    if not folder.exists():
        raise ModelError(f"model folder {folder} does not exist")
    if is_gguf(folder):
        return read_gguf_config(folder)
    file = config_file(folder)
    if not file.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    return read_json_object(file)


def read_generation_config(folder: Path) -> Raw:
    """What `generation_config.json` holds; nothing where there is none."""
    file = folder / "generation_config.json"
    return read_json_object(file) if file.is_file() else {}


def read_stop_ids(folder: Path, raw: Raw) -> list[int]:
    """`generation_config.json` may list more stop ids than `config.json`, as chat models do. Raises `ModelError`."""
    with at_fault(folder / "generation_config.json"):
        ids = stop_ids(read_generation_config(folder))
    with at_fault(config_file(folder)):
        ids += stop_ids(raw)
    return list(dict.fromkeys(ids))


def stop_ids(raw: Raw, within: str = "") -> list[int]:
    """One or several; none where nothing is said of them. `within`: where `raw` stands, for errors."""
    name = "eos_token_id"
    if isinstance(value := raw.get(name), list):
        return list(wholes({name: [each for each in value if each is not None]}, name, within=within))
    return [] if value is None else [whole(raw, name, within=within)]
