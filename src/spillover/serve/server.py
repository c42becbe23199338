"""A model over HTTP/1.1, as the OpenAI API has it.

``/v1/models``, ``/v1/chat/completions``, ``/v1/completions``, ``/v1/files`` and ``/v1/batches`` are that
API's; ``GET /metrics`` is Prometheus text, ``GET /health`` says whether requests are taken. Every refusal is
an error object with one line: 400 what cannot be answered and which field is wrong, 401 a wrong token, 404
and 405, 408 a body that does not come, 413 one that is too large, 429 too many answers under way, 500 an
engine that failed, 503 a server that is ending, 507 a full disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import socket
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spillover.errors import InputError, SpillError, StoreFull
from spillover.http.serving import Server, guarded, run
from spillover.serve.answers import answering
from spillover.serve.batches import Batches
from spillover.serve.figures import prometheus
from spillover.serve.files import Files
from spillover.serve.refusals import Refused, error_object
from spillover.serve.service import Service
from spillover.serve.uploads import routes

__all__ = ["alone", "application", "serve"]

RETRY_AFTER = "1"
"""Seconds, told to whoever is refused for the moment."""
LAST_SECONDS = 2
"""How long connections have to close once nothing is under way any more."""
SAVE_SECONDS = 10.0
"""How much longer than the grace the end may take: a pass may be under way, and a batch saves what it has."""


def application(service: Service, files: Files, batches: Batches, token: str | None = None) -> ASGIApp:
    """The ASGI application.

    Args:
        token: required as a bearer token of every request but ``/health``.
    """
    created = int(time.time())

    def described(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": created, "owned_by": "spillover"}

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [described(name) for name in service.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in service.names:
            raise Refused(404, f"there is no model {name[:80]!r} here", param="model", code="model_not_found")
        return _json(described(name))

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(prometheus(service, batches))

    async def health(request: Request) -> Response:
        service.require_open()
        return PlainTextResponse("ok\n")

    served = Starlette(
        routes=[
            Route("/v1/models", guarded(models, token)),
            Route("/v1/models/{name:path}", guarded(model, token)),
            Route("/v1/chat/completions", guarded(answering(service, "chat"), token), methods=["POST"]),
            Route("/v1/completions", guarded(answering(service, "completions"), token), methods=["POST"]),
            *routes(service, files, batches, token),
            Route("/metrics", guarded(metrics, token)),
            Route("/health", health),
        ],
        exception_handlers={
            Refused: _refused,
            HTTPException: _refused_by_http,
            SpillError: _refused_by_machine,
            Exception: _failed,
        },
    )
    served.router.redirect_slashes = False
    return _Counted(served, service)


def serve(
    service: Service,
    state: Path,
    bound: socket,
    *,
    token: str | None,
    ready: Callable[[int], None],
) -> None:
    """Serve until SIGTERM or SIGINT, and then what is under way for the grace of the settings.

    Args:
        state: folder of files and batches, this process's `alone`; batches that have not ended continue.
        ready: told the port once connections are accepted.

    Raises:
        Exception: the engine failed for good.
    """
    service.loop.start()
    files = Files(state / "files")
    try:
        with Batches(state / "batches", files, service) as batches:
            closing = _Closing(service, batches)
            run(
                application(service, files, batches, token),
                bound,
                ready=ready,
                watch=closing.watch,
                signalled=closing.signalled,
                grace=LAST_SECONDS,
            )
            if closing.at_once:
                os._exit(0)  # what is durable is; a pass under way is not waited for
            batches.close(closing.left())
            service.loop.close(closing.left())
    finally:
        service.loop.close(0)
    if service.loop.error is not None:
        raise service.loop.error


class _Closing:
    """Ends a server: at a signal once all is answered and saved or the grace is over, at a second at once."""

    def __init__(self, service: Service, batches: Batches) -> None:
        self.service, self.batches = service, batches
        self.at_once = False
        self._end: float | None = None

    def left(self) -> float:
        """Seconds until the process should be gone."""
        end = time.monotonic() + SAVE_SECONDS if self._end is None else self._end + SAVE_SECONDS
        return max(0.0, end - time.monotonic())

    def signalled(self, server: Server) -> None:
        """Hear a signal."""
        if self.service.draining:
            self.at_once = server.force_exit = server.should_exit = True
        self.service.draining = True

    async def watch(self, server: Server) -> None:
        """End the server when it is time."""
        self.service.outbox.attach()
        while not self.service.draining:
            await asyncio.sleep(0.05)
            if self.service.loop.error is not None:
                server.should_exit = True
                return
        self.batches.stop()
        self._end = time.monotonic() + self.service.settings.grace
        while time.monotonic() < self._end and not (self.batches.stopped and not self.service.rows):
            await asyncio.sleep(0.05)
        self._end = min(self._end, time.monotonic())
        self.service.loop.close(0)  # whoever still waits is told so
        server.should_exit = True


class _Counted:
    """Counts requests by path and status."""

    def __init__(self, inner: Starlette, service: Service) -> None:
        self._inner, self._service = inner, service
        found = (route for route in inner.routes if isinstance(route, Route))
        self._paths: dict[Any, str] = {route.endpoint: route.path for route in found}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                key = (self._paths.get(scope.get("endpoint"), "other"), message["status"])
                self._service.requests[key] = self._service.requests.get(key, 0) + 1
            await send(message)

        await self._inner(scope, receive, counted)


@contextlib.contextmanager
def alone(state: Path) -> Iterator[None]:
    """Be the one process that serves from a folder.

    Raises:
        InputError: another one does, or it cannot be written.
    """
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = (state / ".lock").open("w")
    except OSError as error:
        raise InputError(f"{state} cannot be written: {error.strerror}", hint="--state FOLDER") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"another server keeps its files in {state}", hint="--state FOLDER") from None
        yield


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {"Retry-After": RETRY_AFTER} if error.status in (429, 503) else None
    return _json(error.body, error.status, headers)


async def _refused_by_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {401: "invalid_api_key", 404: "unknown_url"}.get(error.status_code)
    body = error_object(error.status_code, error.detail, None, code)
    return _json(body, error.status_code, dict(error.headers or {}))


async def _refused_by_machine(request: Request, error: Exception) -> Response:
    status, message = (507, "no space is left") if isinstance(error, StoreFull) else (503, str(error))
    return _json(error_object(status, message), status)


async def _failed(request: Request, error: Exception) -> Response:
    return _json(error_object(500, "the server failed; its log says why"), 500)


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
