"""A coordinator over HTTP/1.1.

``POST /call`` takes a call (`spillover.queue.messages`), MessagePack by default and JSON under
``Content-Type: application/json``, and answers in the same. ``GET /metrics`` is Prometheus text, ``GET
/health`` says who coordinates. Every refusal is one line: 400 what cannot be understood, 401 a wrong token,
404 and 405, 408 a body that does not come, 409 what a coordinator refused, 413 a body that is too large, 429
a queue that is full or a coordinator with too many calls waiting, 503 a coordinator that was superseded or
whose disk fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from spillover.errors import Busy, Full, InputError, SpillError, StoreError, StoreFull, Superseded
from spillover.http.serving import bind, guarded, read_body, run
from spillover.queue.coordinator import Coordinator
from spillover.queue.metrics import prometheus
from spillover.queue.transport import BODY_BYTES, PATH, decode_call, told

__all__ = ["application", "serve"]

BODY_SECONDS = 30.0
AWAY_SECONDS = 10.0
"""How long the pool's folder may fail before serving ends, so that somebody else can take over."""
RETRY_AFTER = "1"
"""Seconds, told to whoever is refused for the moment; a client of ours tries sooner at first."""


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
        json = kind.endswith("json")
        encode: Callable[[Any], bytes] = msgspec.json.encode if json else msgspec.msgpack.encode

        def answered(body: bytes) -> bytes:  # in a thread: what waits for one is only bytes
            return encode(coordinator.call(decode_call(body, json=json)))

        try:
            with coordinator.inbox.entry() as entry:
                body = await read_body(request, BODY_BYTES, BODY_SECONDS, lambda size: entry.add(size=size))
                entry.add(calls=1)
                answer = await run_in_threadpool(answered, body)
        except Busy as error:  # at once, without a thread
            return _refusal(encode(told(error)), 429, kind)
        except SpillError as error:
            status = await run_in_threadpool(_status, coordinator, error)
            return _refusal(encode(told(error)), status, kind)
        return Response(answer, media_type=kind)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(await run_in_threadpool(prometheus, coordinator))

    async def health(request: Request) -> Response:
        try:
            await run_in_threadpool(coordinator.check)
        except SpillError as error:
            raise HTTPException(503, str(error)) from None
        return PlainTextResponse(f"generation {coordinator.owners.generation}\n")

    served = Starlette(
        routes=[
            Route(PATH, guarded(call, token), methods=["POST"]),
            Route("/metrics", guarded(metrics, token)),
            Route("/health", health),
        ],
        exception_handlers={HTTPException: _refused},
    )
    served.router.redirect_slashes = False
    return served


def serve(
    coordinator: Coordinator, *, host: str, port: int, token: str | None, ready: Callable[[int], None]
) -> None:
    """Serve until SIGTERM or SIGINT, until this process is superseded, or until the pool's folder is away.

    Args:
        port: 0 takes a free one.
        ready: told the port once connections are accepted.
    """
    run(
        application(coordinator, token),
        bind(host, port),
        ready=ready,
        watch=lambda server: _watch(coordinator, server),
        grace=10,
    )


async def _watch(coordinator: Coordinator, server: Any) -> None:
    """Stop serving once another process owns the pool, or its folder is away for good."""
    well = time.monotonic()
    while True:
        await asyncio.sleep(1.0)
        try:
            await run_in_threadpool(coordinator.check)
            well = time.monotonic()
        except Superseded:
            server.should_exit = True
        except StoreError:
            server.should_exit = time.monotonic() - well > AWAY_SECONDS


def _status(coordinator: Coordinator, error: SpillError) -> int:
    """What to answer a call that was refused.

    503 if another coordinator may do better, or this one in a moment. A retired worker's refusal has the
    same class as that of a coordinator which was superseded.
    """
    if isinstance(error, InputError):
        return 400
    if isinstance(error, Full):
        return 429
    if isinstance(error, StoreError) and not isinstance(error, StoreFull):
        return 503
    if isinstance(error, Superseded):
        try:
            coordinator.check()
        except SpillError:
            return 503
    return 409


def _refusal(content: bytes, status: int, kind: str) -> Response:
    headers = {"Retry-After": RETRY_AFTER} if status == 429 else None
    return Response(content, status, headers, media_type=kind)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", error.status_code, headers=error.headers)
