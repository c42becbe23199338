"""A connection of `spillover.queue.server` that nobody keeps open for nothing.

uvicorn waits for ever for the first request of a connection, for the rest of a request's head, and for the
end of a body that was refused before it came. Here each of these has a time.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["QUIET_SECONDS", "Connection"]

QUIET_SECONDS = 75.0
"""How long a connection stays open while no request of it is being answered."""


class Connection(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, with the time limit `QUIET_SECONDS` between requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._quiet: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        """Let the time run while no request is being answered, whatever arrives meanwhile."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._quiet is None and not self.transport.is_closing():
            self._quiet = self.loop.call_later(QUIET_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None
