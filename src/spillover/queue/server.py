"""A coordinator over HTTP/1.1.

``POST /call`` takes a call (`spillover.queue.messages`), MessagePack by default and JSON under
``Content-Type: application/json``, and answers in the same. ``GET /metrics`` is Prometheus text, ``GET
/health`` says who coordinates. Every refusal is one line: 400 what cannot be understood, 401 a wrong token,
404 and 405, 408 a body that does not come, 409 what a coordinator refused, 413 a body that is too large, 503
a coordinator that was superseded.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from spillover.errors import InputError, SpillError, Superseded
from spillover.queue.coordinator import Coordinator
from spillover.queue.metrics import prometheus
from spillover.queue.transport import PATH, decode_call, told

__all__ = ["application", "serve"]

BODY_BYTES = 16 << 20
BODY_SECONDS = 30.0
Endpoint = Callable[[Request], Awaitable[Response]]


def application(coordinator: Coordinator, token: str | None = None) -> Starlette:
    """The ASGI application.

    Args:
        token: required as a bearer token of every request but ``/health``.
    """

    async def call(request: Request) -> Response:
        kind = request.headers.get("content-type", "application/msgpack").partition(";")[0].strip()
        if kind not in ("application/msgpack", "application/json"):
            raise HTTPException(
                415, f"Content-Type {kind[:60]} is neither application/msgpack nor application/json"
            )
        body = await _body(request)
        encode: Callable[[Any], bytes] = (
            msgspec.json.encode if kind.endswith("json") else msgspec.msgpack.encode
        )
        try:
            wanted = decode_call(body, json=kind.endswith("json"))
            answer = await run_in_threadpool(coordinator.call, wanted)
        except SpillError as error:
            status = 400 if isinstance(error, InputError) else 503 if isinstance(error, Superseded) else 409
            return Response(encode(told(error)), status, media_type=kind)
        return Response(encode(answer), media_type=kind)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(await run_in_threadpool(prometheus, coordinator))

    async def health(request: Request) -> Response:
        return PlainTextResponse(f"generation {coordinator.owners.generation}\n")

    return Starlette(
        routes=[
            Route(PATH, _guarded(call, token), methods=["POST"]),
            Route("/metrics", _guarded(metrics, token)),
            Route("/health", health),
        ],
        exception_handlers={HTTPException: _refused},
    )


def serve(
    coordinator: Coordinator, *, host: str, port: int, token: str | None, ready: Callable[[int], None]
) -> None:
    """Serve until SIGTERM or SIGINT, or until this process is superseded.

    Args:
        port: 0 takes a free one.
        ready: told the port once connections are accepted.
    """
    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            application(coordinator, token),
            host=host,
            port=port,
            log_level="warning",
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=10,
            limit_concurrency=1000,
        )
    )

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            ready(server.servers[0].sockets[0].getsockname()[1])
        watching = asyncio.create_task(_watch(coordinator, server))
        await serving
        watching.cancel()

    asyncio.run(run())


async def _watch(coordinator: Coordinator, server: Any) -> None:
    """Stop serving once another process owns the pool."""
    while True:
        await asyncio.sleep(1.0)
        try:
            await run_in_threadpool(coordinator.owners.check)
        except Superseded:
            server.should_exit = True


async def _body(request: Request) -> bytes:
    """The body, if it comes in time and is not too large."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                data += piece
                if len(data) > BODY_BYTES:
                    raise HTTPException(413, f"a body is limited to {BODY_BYTES >> 20} MiB")
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client went away") from None
    return bytes(data)


def _guarded(endpoint: Endpoint, token: str | None) -> Endpoint:
    """``endpoint`` for those who know the token."""
    if token is None:
        return endpoint
    wanted = f"Bearer {token}".encode()

    async def guarded(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, wanted):
            raise HTTPException(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})
        return await endpoint(request)

    return guarded


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", error.status_code, headers=error.headers)
