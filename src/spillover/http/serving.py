"""Serving an ASGI application until a signal or its own watch ends it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from spillover.errors import InputError
from spillover.http import connection

__all__ = ["Endpoint", "Server", "bind", "guarded", "read_body", "run"]

Endpoint = Callable[[Request], Awaitable[Response]]
_BACKLOG = 2048  # connections that wait to be accepted


class Server(uvicorn.Server):
    """uvicorn's, with the signals of `run`.

    Attributes:
        should_exit: once true, it takes no more requests, and ends when those under way are answered.
        force_exit: once true, these are not waited for.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _end(server: Server) -> None:
    server.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address of this machine; port 0 takes a free one.

    Raises:
        InputError: the address is not this machine's, or somebody listens there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off, which holds small answers back for 40 ms, only where TCP is named
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
        bound.listen(_BACKLOG)
        return bound
    except (OSError, OverflowError) as error:
        bound.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            f"{host} port {port} cannot be listened at: {reason}", hint="--port 0 takes a free one"
        ) from None


def run(
    application: ASGIApp,
    bound: socket.socket,
    *,
    ready: Callable[[int], None],
    watch: Callable[[Server], Awaitable[None]],
    signalled: Callable[[Server], None] = _end,
    grace: int = 10,
) -> None:
    """Serve until ``should_exit``.

    Args:
        bound: where to listen, as `bind` made it; closed at the end.
        ready: told the port once connections are accepted.
        watch: runs beside the server and may end it; cancelled when it ends.
        signalled: called in the main thread for each SIGTERM and SIGINT.
        grace: seconds that requests under way have to end in once it should exit.
    """
    port: int = bound.getsockname()[1]
    server = Server(
        uvicorn.Config(
            application,
            http=connection.Connection,
            ws="none",
            log_level="error",
            lifespan="off",
            timeout_keep_alive=int(connection.QUIET_SECONDS),
            timeout_graceful_shutdown=grace,
        )
    )

    async def serve() -> None:
        serving = asyncio.create_task(server.serve([bound]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            ready(port)
        watching = asyncio.ensure_future(watch(server))
        await serving
        watching.cancel()

    with _many_files(), _signals(lambda: signalled(server)):
        asyncio.run(serve())


def guarded(endpoint: Endpoint, token: str | None) -> Endpoint:
    """``endpoint`` for those who know the token."""
    if token is None:
        return endpoint
    wanted = f"Bearer {token}".encode()  # headers are read as Latin-1, whatever bytes they are

    async def guarded(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, wanted):
            raise HTTPException(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})
        return await endpoint(request)

    return guarded


async def read_body(
    request: Request, most: int, seconds: float, admit: Callable[[int], None] = lambda size: None
) -> bytes:
    """The body, if it comes within ``seconds`` and is no larger than ``most`` bytes.

    ``admit`` is told the size of each piece and may refuse it by raising.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                if len(data) + len(piece) > most:
                    raise HTTPException(413, f"a body is limited to {most >> 20} MiB")
                admit(len(piece))
                data += piece
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {seconds:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client went away") from None
    return bytes(data)


@contextlib.contextmanager
def _many_files() -> Iterator[None]:
    """Let this process have as many connections as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says "unlimited" and does not mean it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def _signals(heard: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call ``heard`` and do nothing else."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: Any) -> None:
        heard()

    before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
