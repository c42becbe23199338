"""``/v1/chat/completions`` and ``/v1/completions``: from a checked call to its response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from spillover.engine import Completion, TokenLogprob
from spillover.errors import SpillError
from spillover.http.serving import Endpoint, read_body
from spillover.serve.calls import Call, Kind, Limits, read_call
from spillover.serve.refusals import Refused
from spillover.serve.replies import DONE, Reply, Speech, event
from spillover.serve.service import News, Service

__all__ = ["BODY_BYTES", "BODY_SECONDS", "answering"]

BODY_BYTES = 16 << 20
BODY_SECONDS = 30.0
T = TypeVar("T")


class _Gone(Exception):
    """The client went away."""


def answering(service: Service, kind: Kind) -> Endpoint:
    """The endpoint that answers calls of a kind."""

    async def answer(request: Request) -> Response:
        service.require_open()
        limits = Limits(service.context, service.settings.max_tokens, service.names)
        with service.bodies() as admit:
            data = await read_body(request, BODY_BYTES, BODY_SECONDS, admit)
            call = await run_in_threadpool(read_call, kind, data, service.tokenizer, limits)
        service.require_room(len(call.prompts) * call.samples)  # before any of them is made
        if call.stream:
            return await _streamed(service, call)
        try:
            return await _unless_gone(request, _whole(service, call))
        except _Gone:
            return Response(status_code=499)  # for the record: nobody reads it

    return answer


async def _whole(service: Service, call: Call) -> Response:
    """The answer, once all its choices are complete."""
    requests = call.requests()
    completions: dict[int, Completion] = {}
    async with service.answering(requests, streams=False) as news:
        while len(completions) < len(requests):
            place, what = await news.get()
            if isinstance(what, SpillError):
                raise _failure(what)
            assert isinstance(what, Completion)
            completions[place] = what
    reply = Reply(call, service.tokenizer)
    found = [completions[place] for place in range(len(requests))]
    content = await run_in_threadpool(lambda: msgspec.json.encode(reply.whole(found)))
    return Response(content, media_type="application/json")


async def _streamed(service: Service, call: Call) -> Response:
    """The answer as events, from its first token on."""
    requests = call.requests()
    context = service.answering(requests, streams=True)
    news = await context.__aenter__()  # refuses before anything is sent

    async def leave() -> None:
        await context.__aexit__(None, None, None)

    return _EventStream(_events(service, call, news), leave)


async def _events(service: Service, call: Call, news: asyncio.Queue[News]) -> AsyncIterator[bytes]:
    """The events of an answer, those that come together as one piece."""
    reply = Reply(call, service.tokenizer)
    choices = len(call.prompts) * call.samples
    voices = [_Voice(reply, place) for place in range(choices)]
    yield b"".join(reply.begin(place) for place in range(choices))
    completions: list[Completion] = []
    while len(completions) < choices:
        place, what = await news.get()
        if isinstance(what, SpillError):
            failed = _failure(what)
            yield event(failed.body)
            return
        if isinstance(what, Completion):
            completions.append(what)
            yield voices[place].end(what)
        elif piece := voices[place].push(*what):
            yield piece
    if call.usage:
        yield reply.usage_event(completions)
    yield DONE


class _Voice:
    """The events of one choice. Tokens are reported with the text that they complete, none twice."""

    def __init__(self, reply: Reply, place: int) -> None:
        self._reply, self._place = reply, place
        self._speech = Speech(reply.tokenizer, reply.call.decoding["stop"])
        self._tokens: list[tuple[int, TokenLogprob | None]] = []
        self._told = reply.call.token_ids or reply.call.decoding["logprobs"] is not None

    def push(self, token: int, logprob: TokenLogprob | None) -> bytes:
        """A token; the events that it causes, if any."""
        self._tokens.append((token, logprob))
        return self._piece(self._speech.push(token))

    def end(self, completion: Completion) -> bytes:
        """The choice is complete."""
        return self._piece(self._speech.end()) + self._reply.end(self._place, completion)

    def _piece(self, text: str) -> bytes:
        if not text and not (self._told and self._tokens):
            return b""
        tokens, self._tokens = self._tokens, []
        return self._reply.piece(self._place, text, tokens)


class _EventStream(StreamingResponse):
    """Server-sent events. ``leave`` is called in the end, also when the client goes away before it."""

    def __init__(self, content: AsyncIterator[bytes], leave: Callable[[], Awaitable[None]]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._leave()


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What ``work`` gives.

    Raises:
        _Gone: the client went away before.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Gone
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _failure(error: SpillError) -> Refused:
    return Refused(500, str(error), code="engine_error")
