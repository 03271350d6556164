"""The description of the routes, `/openapi.json`, made true where the framework guesses."""

from typing import Any

from fastapi import FastAPI

_GUESS = "#/components/schemas/HTTPValidationError"
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
_NO_KEY = {"description": "There are API keys, and none that holds came with the request", "content": _ERROR}
_INVALID = {"description": "A field is missing, unknown or can not be used", "content": _ERROR}
# Routes that answer 400, as OpenAI's do, where others answer 422.
_OPENAI = ("/v1/", "/tokenize", "/detokenize")
_OPEN = ("/health", "/ready", "/metrics")
_KEY = {"key": {"type": "http", "scheme": "bearer", "description": "Needed from the first API key on"}}


def describe(app: FastAPI) -> None:
    """Have `app` say how a key is sent, and which errors its routes answer: all in the shape of `ErrorBody`."""
    made = app.openapi

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = made()
            for path, operations in found["paths"].items():
                for operation in operations.values():
                    _correct(path, operation)
            found["components"]["securitySchemes"] = _KEY
            for name in ("HTTPValidationError", "ValidationError"):
                found["components"]["schemas"].pop(name, None)
        return made()

    app.openapi = description  # type: ignore[method-assign]


def _correct(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    if responses.get("422", {}).get("content", {}).get("application/json", {}).get("schema") == {"$ref": _GUESS}:
        del responses["422"]
        responses.setdefault("400" if path.startswith(_OPENAI) else "422", _INVALID)
    if path not in _OPEN:
        responses.setdefault("401", _NO_KEY)
        # With a key or, until there is one, without.
        operation["security"] = [{name: []} for name in _KEY] + [{}]
