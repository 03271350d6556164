"""Pages for people: files that hold no data and ask nobody but this server, with the key that their reader gives."""

import hashlib
import re
from base64 import b64encode
from importlib.resources import files

from fastapi import Response
from starlette.responses import HTMLResponse


class Page:
    """One of the files beside this one."""

    def __init__(self, file_name: str) -> None:
        self._text = files(__package__).joinpath(file_name).read_text(encoding="utf-8")
        self._headers = {"Content-Security-Policy": _policy(self._text), "Cache-Control": "no-cache"}

    def response(self) -> Response:
        return HTMLResponse(self._text, headers=self._headers)


def _policy(page: str) -> str:
    """What the page may do: run the script and the styles that are in it, and ask this server."""
    inline = {kind: re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL) for kind in ("script", "style")}
    allowed = [f"{kind}-src {' '.join(map(_source, texts))}" for kind, texts in inline.items()]
    rest = ("connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
    return "; ".join(("default-src 'none'", *allowed, *rest))


def _source(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
