"""``/v1/files`` and ``/v1/batches``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import IO, Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from spillover.http.serving import guarded, read_body
from spillover.serve.batches import ENDPOINT, Batch, Batches
from spillover.serve.calls import body_of
from spillover.serve.files import File, Files
from spillover.serve.refusals import Refused
from spillover.serve.service import Service

__all__ = ["routes"]

FILE_BYTES = 512 << 20
PIECE = 1 << 20
SMALL_BYTES = 1 << 20
"""Of a body that creates a batch."""
BODY_SECONDS = 30.0
PIECE_SECONDS = 30.0
"""How long an upload may say nothing."""
UPLOADS = 4
"""Uploads at once; others wait."""
METADATA = 16
"""Most pairs of a batch's metadata; keys have up to 64 characters, values up to 512."""


def routes(service: Service, files: Files, batches: Batches, token: str | None) -> list[Route]:
    """The routes of both."""
    hands = _Hands(service, files, batches)
    table = (
        ("/v1/files", "POST", hands.upload),
        ("/v1/files", "GET", hands.list_files),
        ("/v1/files/{name}", "GET", hands.file),
        ("/v1/files/{name}", "DELETE", hands.delete),
        ("/v1/files/{name}/content", "GET", hands.content),
        ("/v1/batches", "POST", hands.create),
        ("/v1/batches", "GET", hands.list_batches),
        ("/v1/batches/{name}", "GET", hands.batch),
        ("/v1/batches/{name}/cancel", "POST", hands.cancel),
    )
    return [Route(path, guarded(endpoint, token), methods=[method]) for path, method, endpoint in table]


class _Hands:
    """The endpoints."""

    def __init__(self, service: Service, files: Files, batches: Batches) -> None:
        self.service, self.files, self.batches = service, files, batches
        self._uploads = asyncio.Semaphore(UPLOADS)

    async def upload(self, request: Request) -> Response:
        self.service.require_open()
        async with self._uploads, _form(request) as form:
            purpose, file = form.get("purpose"), form.get("file")
            if purpose != "batch":
                raise Refused(400, "purpose must be batch", param="purpose")
            if not isinstance(file, UploadFile):
                raise Refused(400, "file is missing: it is the part with the bytes", param="file")
            # a name that is no text is made one
            name = (file.filename or "file.jsonl").encode("utf-8", "replace").decode()
            if not file.size:
                raise Refused(400, f"{name} is empty", param="file")
            kept = await run_in_threadpool(self.files.add, name, "batch", _pieces(file.file))
        return _json(kept)

    async def list_files(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        found = await run_in_threadpool(self.files.list)
        return _page(request, [one for one in found if purpose in (None, one.purpose)], 10_000)

    async def file(self, request: Request) -> Response:
        return _json(self._file(request.path_params["name"]))

    async def content(self, request: Request) -> Response:
        file = self._file(request.path_params["name"])
        # whole or not at all: a range that makes no sense would be refused in words of its own
        request.scope["headers"] = [pair for pair in request.scope["headers"] if pair[0] != b"range"]
        return FileResponse(self.files.path(file.id), media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        file = self._file(request.path_params["name"])
        if not await run_in_threadpool(self.batches.delete_file, file.id):
            raise Refused(409, f"a batch that has not ended reads {file.id}", code="file_in_use")
        return _json({"id": file.id, "object": "file", "deleted": True})

    async def create(self, request: Request) -> Response:
        self.service.require_open()
        body = body_of(await read_body(request, SMALL_BYTES, BODY_SECONDS))
        known = ("input_file_id", "endpoint", "completion_window", "metadata")
        if unknown := next((key for key in body if key not in known), None):
            raise Refused(400, f"unknown key {unknown[:60]!r}", param=unknown[:60])
        if body.get("endpoint") != ENDPOINT:
            raise Refused(400, f"endpoint must be {ENDPOINT}", param="endpoint")
        file, window = body.get("input_file_id"), body.get("completion_window", "24h")
        if not isinstance(file, str) or (found := self.files.get(file)) is None:
            raise Refused(400, f"there is no file {str(file)[:80]!r}", param="input_file_id")
        if found.purpose != "batch":
            raise Refused(400, f"{file} is no batch's input", param="input_file_id")
        if not isinstance(window, str):
            raise Refused(400, "completion_window must be a string", param="completion_window")
        metadata = _metadata(body.get("metadata"))
        batch = await run_in_threadpool(self.batches.create, file, window, metadata)
        if batch is None:
            raise Refused(400, f"there is no file {file[:80]!r} any more", param="input_file_id")
        return _json(batch)

    async def list_batches(self, request: Request) -> Response:
        return _page(request, self.batches.list(), 20)

    async def batch(self, request: Request) -> Response:
        return _json(self._batch(request.path_params["name"]))

    async def cancel(self, request: Request) -> Response:
        batch = self._batch(request.path_params["name"])
        await run_in_threadpool(self.batches.cancel, batch)
        return _json(batch)

    def _file(self, name: str) -> File:
        if (file := self.files.get(name)) is None:
            raise Refused(404, f"there is no file {name[:80]!r}", param="id")
        return file

    def _batch(self, name: str) -> Batch:
        if (batch := self.batches.get(name)) is None:
            raise Refused(404, f"there is no batch {name[:80]!r}", param="id")
        return batch


@contextlib.asynccontextmanager
async def _form(request: Request) -> AsyncIterator[dict[str, Any]]:
    """The fields of a form; a large file in it waits on disk."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise Refused(400, "a file comes as multipart/form-data")

    async def counted() -> AsyncGenerator[bytes, None]:
        size, pieces = 0, request.stream()
        while True:
            try:
                async with asyncio.timeout(PIECE_SECONDS):
                    piece = await anext(pieces, None)
            except TimeoutError:
                raise HTTPException(408, f"nothing of the file came for {PIECE_SECONDS:g} s") from None
            if piece is None:
                return
            size += len(piece)
            if size > FILE_BYTES:
                raise HTTPException(413, f"a file is limited to {FILE_BYTES >> 20} MiB")
            yield piece

    try:
        parser = MultiPartParser(request.headers, counted(), max_files=1, max_fields=8)
        form = await parser.parse()
    except ClientDisconnect:
        raise HTTPException(400, "the client went away") from None
    except MultiPartException as error:
        raise Refused(400, f"the form cannot be read: {error.message}") from None
    except (UnicodeError, LookupError):
        raise Refused(400, "the form is not in UTF-8") from None
    except OSError as error:  # a large file waits on disk
        raise HTTPException(507, f"the file cannot be kept: {error.strerror}") from None
    try:
        yield dict(form)
    finally:
        await form.close()


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    fits = isinstance(value, dict) and len(value) <= METADATA
    if not fits or not all(isinstance(v, str) and len(k) <= 64 and len(v) <= 512 for k, v in value.items()):
        raise Refused(400, f"metadata must be up to {METADATA} short strings by name", param="metadata")
    return dict(value)


def _page(request: Request, found: list[Any], usual: int) -> Response:
    """A page of a list, after the one called ``after``."""
    after, limit = request.query_params.get("after"), request.query_params.get("limit", str(usual))
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 5 and 1 <= int(limit) <= 10_000):
        raise Refused(400, "limit must be from 1 to 10000", param="limit")
    ids = [one.id for one in found]
    if after is not None and after not in ids:
        raise Refused(400, f"there is no {after[:80]!r} to go on after", param="after")
    first = ids.index(after) + 1 if after is not None else 0
    page = found[first : first + int(limit)]
    return _json(
        {
            "object": "list",
            "data": page,
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": first + len(page) < len(found),
        }
    )


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
