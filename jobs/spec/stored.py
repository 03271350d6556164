"""What was written down, read again: descriptions of jobs, of rows and of requests."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import LaterVersion
from .problems import problem

Stored = TypeVar("Stored", bound=BaseModel)


def read_stored(kind: type[Stored], values: Mapping[str, Any] | str, what: str = "job") -> Stored:
    """The description of a job, of a row of one, or of what else it is, as it was written down; a text is JSON.

    Raises `LaterVersion` where it asks for what is not known here.
    """
    try:
        return kind.model_validate_json(values) if isinstance(values, str) else kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise LaterVersion(f"the {what} is of a later headrace ({name}: {problem(first)}): upgrade this one") from error
