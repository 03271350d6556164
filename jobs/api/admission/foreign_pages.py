"""What pages of other sites may have a browser ask here while no key is needed: nothing that changes or tells anything.

A server that listens on this machine only is still within reach of every page that somebody on it has open. A form
can be sent to it (cross-site request forgery), and a name server can give a page's own name this machine's address, so
that the page may read the answers too (DNS rebinding). Where a key is needed neither has one.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from ..errors import error_response

_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
# What browsers say of a request of a page's own, and of one of their user's.
_OWN_SITES = frozenset(("same-origin", "none"))
# Nobody can register a name under these: the first never leaves this machine, the second is for private networks, such
# as `host.docker.internal`.
_PRIVATE_ENDINGS = (".localhost", ".internal")
_ADVICE = "without an API key only localhost is: make one with `headrace keys create`, or serve with --allow-anonymous"


def refusal(scope: Scope, local_names_only: bool, allowed_origins: Collection[str] = ()) -> Response | None:
    """Why a request that needed no key is not answered all the same (403), if it is not.

    `local_names_only`: whether it has to have been sent to an IP address or to a name that can only be this machine's.
    `allowed_origins`: whose pages may do all that a program may; "*": any page.
    """
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    if local_names_only and host and not _is_local(host):
        return error_response(403, f"the host {host!r} is not answered: {_ADVICE}", "host_not_allowed")
    # What a page asks otherwise its browser does not let it read, what comes through a WebSocket it does.
    is_socket = scope["type"] == "websocket"
    is_allowed = "*" in allowed_origins or origin in allowed_origins
    if not is_allowed and (is_socket or scope["method"] not in _SAFE_METHODS) and _is_foreign(headers, host, origin):
        kept = "open no WebSocket" if is_socket else "change nothing"
        message = (
            f"a page of {origin or 'another site'} may {kept} here while no API key is needed, unless the server has "
            "its origin among --allowed-origins"
        )
        return error_response(403, message, "origin_not_allowed")
    return None


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    name = name.removesuffix(".")
    if name == "localhost" or name.endswith(_PRIVATE_ENDINGS):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_foreign(headers: Headers, host: str, origin: str | None) -> bool:
    """As browsers say it, the newer ones in a word; programs say neither."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in _OWN_SITES
    return origin is not None and origin.partition("://")[2] != host
