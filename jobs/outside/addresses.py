"""Addresses that HTTP clients have named and our processes connect to: webhooks and inputs.

Whoever may send us a request could else have us talk to what only we can reach: a metadata service, a database,
ourselves. So a host's addresses are looked up once, checked, and one that was checked is connected to: a name server
that answers otherwise a moment later changes nothing.
"""

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import SplitResult, unquote, urlsplit

import httpx2

from ..errors import JobError

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What Python before 3.12.4 counts as global but for a few: a cloud has its metadata service in it (192.0.0.192).
_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")
_PORTS = {"http": 80, "https": 443}


class AddressRefused(JobError):
    """A URL, or the host in it, is not one that a client may have us connect to. The message goes after its name."""


def check_prefix(url: str, prefixes: Sequence[str]) -> None:
    """Raises `AddressRefused` unless the URL is what it seems to be and begins with one of the prefixes."""
    _parsed(url)
    if not any(_begins_with(url, prefix) for prefix in prefixes):
        allowed = ", ".join(prefixes) or "none"
        raise AddressRefused(f"does not begin with what this server allows ({allowed})")


def check_web_url(url: str) -> None:
    """Raises `AddressRefused` unless it is an http or https URL with a host."""
    parts = _parsed(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise AddressRefused("must be an http:// or https:// URL")


def is_web_url(url: str) -> bool:
    return url.startswith(("http://", "https://"))


async def allowed_addresses(host: str, port: int, allow_private: bool) -> list[str]:
    """The host's addresses that may be connected to. Raises `AddressRefused` when there is none, OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return _allowed(host, [str(entry[4][0]) for entry in found], allow_private)


def expect_public_host(url: str) -> None:
    """Raises `AddressRefused` where all addresses of a web URL's host are private; of a name without any nothing is
    known yet.
    """
    host = urlsplit(url).hostname
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        _allowed(str(host), [str(entry[4][0]) for entry in found], allow_private=False)


def _allowed(host: str, addresses: Sequence[str], allow_private: bool) -> list[str]:
    allowed = [address for address in dict.fromkeys(addresses) if allow_private or is_public(address)]
    if not allowed:
        what = host if host == addresses[0] else f"{host} has the address {addresses[0]}, which"
        allows = "HEADRACE_ALLOW_PRIVATE_ADDRESSES=true allows it"
        raise AddressRefused(f"is refused: {what} is not on the public internet; {allows}")
    return allowed


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet's: no loopback, link-local, private or multicast one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        # IPv4 addresses in IPv6's clothes.
        inner = ip.ipv4_mapped or ip.sixtofour or (ipaddress.IPv4Address(int(ip) & 2**32 - 1) if ip in _NAT64 else None)
        if inner is not None or ip.teredo is not None:
            return inner is not None and is_public(str(inner))
        # Python counts both as global: what no network routes, and what some sites still use within.
        if ip.is_reserved or ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and ip not in _PROTOCOLS


def outside_client(allow_private: bool, timeout_seconds: float) -> httpx2.AsyncClient:
    """A client that connects to allowed addresses only, and follows no redirect.

    Its requests raise `AddressRefused` else. It takes no proxy from the environment: that would do the connecting.
    """
    return httpx2.AsyncClient(transport=_OutsideTransport(allow_private), timeout=timeout_seconds, trust_env=False)


class _OutsideTransport(httpx2.AsyncBaseTransport):
    def __init__(self, allow_private: bool) -> None:
        self._allow_private = allow_private
        # No connection is used twice: two hosts with one address would share it, and its certificate.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._inner = httpx2.AsyncHTTPTransport(verify=_ssl_context(), trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        host = request.url.host
        try:
            addresses = await allowed_addresses(
                host, request.url.port or _PORTS[request.url.scheme], self._allow_private
            )
        except (OSError, UnicodeError) as error:
            raise httpx2.ConnectError(f"{host} has no address: {error}", request=request) from error
        for address in addresses[:-1]:
            try:
                return await self._inner.handle_async_request(_addressed_to(request, address))
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue
        return await self._inner.handle_async_request(_addressed_to(request, addresses[-1]))

    async def aclose(self) -> None:
        await self._inner.aclose()


def _addressed_to(request: httpx2.Request, address: str) -> httpx2.Request:
    """The request for an address; the Host header and the certificate's name stay the host's."""
    return httpx2.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    return httpx2.create_ssl_context(trust_env=False)


def _parsed(url: str) -> SplitResult:
    if not url.isprintable() or " " in url or "\\" in url:
        raise AddressRefused("has characters that no URL has")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise AddressRefused(f"is not a URL: {error}") from error
    if parts.scheme in _PORTS and not parts.hostname:
        raise AddressRefused("names no host")
    if "@" in parts.netloc:
        raise AddressRefused("must not contain a user or a password")
    # What follows `::` is for fsspec another URL, wrapped by the first.
    if "::" in url.replace(parts.netloc, "", 1):
        raise AddressRefused("must not be a chain of URLs")
    if ".." in unquote(url).split("/"):
        raise AddressRefused("must not contain ..")
    return parts


def _begins_with(url: str, prefix: str) -> bool:
    """Whether the prefix ends where a part of the URL does: `s3://rows` is no beginning of `s3://rows-of-others/a`."""
    rest = url.removeprefix(prefix)
    return url.startswith(prefix) and (prefix.endswith(("/", ":")) or rest[:1] in ("", "/", ":", "?"))
