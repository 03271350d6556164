"""What all bodies of OpenAI's requests have in common: how they are checked, and what is said when they do not fit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from ...spec.problems import problem
from ..errors import ApiError

BodyType = TypeVar("BodyType", bound="Body")
UNSUPPORTED = "unsupported_parameter"
_MISFIT = "misfit"
# No field of ours has a longer name. What a caller made up is not sent back at any length.
_MAX_NAME = 64


class Body(BaseModel):
    """Part of a request. Strict, as OpenAI is: the text "1" is no number, and an unknown field is refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


def only(*harmless: Any, instead: str = "leave it out") -> Callable[[Any], Any]:
    """A check for a field that can not be done here: null and the `harmless` values ask for nothing.

    `instead`: what is to be done about any other.
    """

    def check(value: Any) -> Any:
        if value is None or value in harmless:
            return value
        raise PydanticCustomError(UNSUPPORTED, "is not supported here: {instead}", {"instead": instead})

    return check


def misfit(param: str, message: str, code: str = "invalid_value") -> PydanticCustomError:
    """What a check of several fields raises: the error is that of `param`."""
    return PydanticCustomError(_MISFIT, "{message}", {"message": message, "param": param, "code": code})


def listed(given: Any, what: str) -> Any:
    """What is given where a text could be, and is none: a list of `what`. Raises pydantic's error."""
    if isinstance(given, list):
        return given
    raise PydanticCustomError("content_type", "Input should be a text or a list of {what}", {"what": what})


Unsupported = Annotated[Any, AfterValidator(only())]
# Meant for OpenAI's own house (billing, storage, caching): no answer is different with it.
Ignored = Any


class HostedFields(Body):
    """What chats and responses alike have of that kind."""

    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None


def parse_body(kind: type[BodyType], values: Any) -> BodyType:
    """A request's JSON, already decoded, as its schema. Raises `ApiError` (400) naming the field at fault."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from error


def refusal(error: Mapping[str, Any], location: Sequence[Any] | None = None) -> ApiError:
    """One of pydantic's errors as OpenAI says it: status 400, `param` as in `messages[0].content`."""
    if error["type"] == _MISFIT:
        return ApiError(400, error["ctx"]["message"], error["ctx"]["code"], error["ctx"]["param"])
    location = error["loc"] if location is None else location
    param = param_of(location)
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", "unknown_parameter", param)
    if error["type"] == "missing":
        return ApiError(400, f"Missing required parameter: {param or 'the body'}", "missing_required_parameter", param)
    words = _problem(error)
    if _is_of_name(location):
        words = f"its name {words.removeprefix('Value ').removeprefix('Input ')}"
    return ApiError(400, f"{param or 'the body'}: {words}", _code(str(error["type"])), param)


def param_of(location: Sequence[Any]) -> str | None:
    parts = location[:-1] if _is_of_name(location) else location
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{_shortened(str(part))}" for part in parts)
    return path.removeprefix(".") or None


def _is_of_name(location: Sequence[Any]) -> bool:
    """Whether an error is about a name of the caller's own, as `metadata` has them, rather than its value."""
    return tuple(location[-1:]) == ("[key]",)


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"


def _code(kind: str) -> str:
    if kind == UNSUPPORTED:
        return UNSUPPORTED
    return "invalid_type" if kind.endswith("_type") else "invalid_value"


def _problem(error: Mapping[str, Any]) -> str:
    return str(error["msg"]) if error["type"] == UNSUPPORTED else problem(error)
