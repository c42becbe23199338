"""A connection that nobody keeps open for nothing.

uvicorn waits for ever for the first request of a connection, for the rest of a request's head, for the end of
a body that was refused before it came, and for a client to take an answer or a part of one. Here each of
these has a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["QUIET_SECONDS", "Connection"]

QUIET_SECONDS = 75.0
"""How long a connection stays open while no request is being answered, and nothing of an answer taken."""


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

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        """Let the time run while no request is being answered, whatever arrives meanwhile, and while the
        client is behind in taking an answer."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and not self.flow.write_paused:
            self._stop()
        elif self._quiet is None and ((left := self._untaken()) or not self.transport.is_closing()):
            self._quiet = self.loop.call_later(QUIET_SECONDS, self._end, left)

    def _end(self, left: int) -> None:
        """Close the connection, unless some of the ``left`` bytes of an answer were taken meanwhile."""
        self._quiet = None
        now = self._untaken()
        if 0 < now < left:
            self._watch()
        elif now:  # closing would wait until the client has taken the rest, here and then in the kernel
            with contextlib.suppress(OSError):
                connection = self.transport.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self.transport.close()

    def _untaken(self) -> int:
        """Bytes of answers that the client has not taken: ours, and those that the kernel holds."""
        held = struct.pack("i", 0)
        with contextlib.suppress(OSError, ValueError):  # not every system says, and it may be closed
            held = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held)
        (kernel,) = struct.unpack("i", held)
        return int(self.transport.get_write_buffer_size() + kernel)

    def _stop(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None
