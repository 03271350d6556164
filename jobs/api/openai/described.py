"""How the routes' answers appear in the OpenAPI description."""

from typing import Any

from ..errors import ErrorBody

_Responses = dict[int | str, dict[str, Any]]

COMPLETION_RESPONSES: _Responses = {
    200: {
        "description": "OpenAI's object, or its chunks as server-sent events that end with `data: [DONE]`",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    400: {"model": ErrorBody, "description": "A field can not be used, or the prompt does not fit into the context"},
    404: {"model": ErrorBody, "description": "The model is not served here"},
    408: {"model": ErrorBody, "description": "Nothing more of the body came for a minute"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    415: {"model": ErrorBody, "description": "The body is not said to be JSON"},
    429: {"model": ErrorBody, "description": "More than the caller's limits, or than may wait here, allow"},
    503: {"model": ErrorBody, "description": "No worker serves the model (yet), or Redis does not answer"},
}
RESPONSE_RESPONSES: _Responses = {
    **COMPLETION_RESPONSES,
    200: {
        "description": "OpenAI's response, or its events as server-sent events, of which the last has the whole of it",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
}
