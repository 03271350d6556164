"""What clients may have us connect to, and that no name server can change it between the check and the connection."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from headrace.jobs.outside import addresses
from headrace.jobs.outside.addresses import AddressRefused, check_prefix, is_public, outside_client

from ..api.receiver import Receiver, receiving

PREFIXES = ("https://", "s3://rows", "http://files.example.com:8000/public/")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.1.1",
        "172.16.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.0.192",
        "::ffff:192.0.0.192",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "64:ff9b::10.0.0.1",
        "2002:7f00:1::1",
        "2001:0:7f00:1::1",
        "::127.0.0.1",
        "::ffff:0:127.0.0.1",
        "64:ff9b:1::7f00:1",
        "fec0::1",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "s3://rows-of-others/a",
        "http://files.example.com:8000/private/a",
        "http://files.example.com:8000/public/../private/a",
        "http://files.example.com:8000/public/%2e%2e/private/a",
        "https://user@example.com/",
        "https://example.com\\@evil.com/",
        "https://example.com/a::file:///etc/passwd",
        "https://example.com/\na",
        "https://[::1/",
        "https:///etc/passwd",
        "https://:443/a",
        "/etc/passwd",
        "",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(AddressRefused):
        check_prefix(url, PREFIXES)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a?b=..",
        "s3://rows/a.parquet",
        "s3://rows",
        "http://files.example.com:8000/public/a b".replace(" ", "+"),
    ],
)
def test_urls_that_are_allowed(url: str) -> None:
    check_prefix(url, PREFIXES)


class Names:
    """A name server. Each look-up of a name takes the next of its answers, the last one again and again."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): found for name, found in answers.items()}
        self.num_asked = 0

    async def getaddrinfo(self, host: str, port: int, **options: Any) -> list[Any]:
        self.num_asked += 1
        found = self.answers[host]
        addresses = found.pop(0) if len(found) > 1 else found[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        receiver.files["/a"] = b"hello"
        yield receiver


def fetch(url: str, names: Names, allow_private: bool = False) -> httpx2.Response:
    async def get() -> httpx2.Response:
        asyncio.get_running_loop().getaddrinfo = names.getaddrinfo  # type: ignore[assignment,method-assign]
        async with outside_client(allow_private, 60.0) as client:
            return await client.get(url)

    return asyncio.run(get())


def test_a_name_of_a_private_address_is_refused(receiver: Receiver) -> None:
    with pytest.raises(AddressRefused, match=r"example\.com has the address 127\.0\.0\.1"):
        fetch(f"http://example.com:{receiver.port}/a", Names(example_com=[["127.0.0.1"]]))


def test_the_address_that_was_checked_is_connected_to(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer, for whoever would ask again, is one that nobody listens on."""
    monkeypatch.setattr(addresses, "is_public", lambda address: address == "127.0.0.1")
    names = Names(example_com=[["127.0.0.1"], ["127.0.0.2"]])
    response = fetch(f"http://example.com:{receiver.port}/a", names)
    assert (response.content, names.num_asked) == (b"hello", 1)
    assert response.request.headers["Host"] == f"example.com:{receiver.port}"


def test_an_address_that_does_not_answer_is_passed_over(receiver: Receiver) -> None:
    names = Names(example_com=[["127.0.0.2", "127.0.0.1"]])
    assert fetch(f"http://example.com:{receiver.port}/a", names, allow_private=True).content == b"hello"


def test_of_several_addresses_the_private_ones_are_not_connected_to(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "is_public", lambda address: address == "127.0.0.2")
    with pytest.raises(httpx2.ConnectError):
        fetch(f"http://example.com:{receiver.port}/a", Names(example_com=[["127.0.0.2", "127.0.0.1"]]))
