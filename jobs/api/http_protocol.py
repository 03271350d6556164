"""HTTP as uvicorn speaks it, with a limit that it lacks: a request's headers have to come within a minute."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# As nginx' client_header_timeout.
HEADER_SECONDS = 60.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection on which a request was expected, or begun, and its headers have not ended in time.

    Between requests uvicorn's own limit holds.
    """

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_headers()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._expect_none()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_none()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _expect_none(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
