"""How a call reaches the coordinator: in the same process, through a Ray actor, or over HTTP.

Over a wire a call and its answer are MessagePack. An error travels by its class name and is raised again as
the same class, with the same message and hint.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import operator
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from spillover import errors
from spillover.errors import Busy, InputError, SpillError, Unknown
from spillover.queue import messages as m
from spillover.queue.coordinator import HANDLERS, VIEWS, Coordinator

__all__ = ["HttpTransport", "LocalTransport", "RayTransport", "Transport", "answer_wire", "decode_call"]

PATH = "/call"
BODY_BYTES = 16 << 20
"""The largest call over HTTP."""
MESSAGE = 1000
"""The longest message of an error: what a client sent may be part of it."""
_AnyCall: Any = functools.reduce(operator.or_, [*HANDLERS, *VIEWS])
_decoder = msgspec.msgpack.Decoder(_AnyCall)
_json_decoder = msgspec.json.Decoder(_AnyCall)
_answers = {
    call: msgspec.msgpack.Decoder(answer)
    for table in (HANDLERS, VIEWS)
    for call, (_, answer) in table.items()
}


class Told(msgspec.Struct, frozen=True):
    """An error on its way to a client."""

    error: str
    message: str
    hint: str | None = None


class Transport(Protocol):
    """Carries calls to a coordinator.

    Attributes:
        lossy: whether an answer can be lost on the way, so that calls need keys.
    """

    lossy: bool

    def call(self, call: m.Call, timeout: float) -> Any:
        """The answer, or its error raised.

        Raises:
            Unknown: no answer within ``timeout`` seconds; the call may have happened.
            Busy: the call was not even begun.
        """

    def close(self) -> None:
        """Let the connection go."""


class LocalTransport:
    """Calls a coordinator in this process."""

    lossy = False

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def call(self, call: m.Call, timeout: float) -> Any:
        with self._coordinator.inbox.entry() as entry:
            entry.add(calls=1)
            return self._coordinator.call(call)

    def close(self) -> None:
        pass


class RayTransport:
    """Calls a Ray actor that has the method ``call(bytes) -> bytes``; see `spillover.queue.actor`."""

    lossy = True

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, call: m.Call, timeout: float) -> Any:
        import ray

        try:
            answer = ray.get(self._actor.call.remote(msgspec.msgpack.encode(call)), timeout=timeout)
        except ray.exceptions.PendingCallsLimitExceeded:
            raise Busy("the coordinator's actor has too many calls of this process waiting") from None
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise Unknown(f"the coordinator's actor gave no answer: {type(error).__name__}") from None
        return _read(call, *answer)

    def close(self) -> None:
        pass


class HttpTransport:
    """Calls ``spill queue serve``, over as many connections as there are calls at once.

    Args:
        url: ``http://host:port``.
        token: sent as a bearer token.
    """

    lossy = True

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise InputError(f"{url} is no address of a coordinator", hint="http://HOST:PORT")
        self._host, self._port = parts.hostname, parts.port or 80
        self._where = f"http://{self._host}:{self._port}"
        self._headers = {"Content-Type": "application/msgpack"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._idle: list[http.client.HTTPConnection] = []

    def call(self, call: m.Call, timeout: float) -> Any:
        body = msgspec.msgpack.encode(call)
        if len(body) > BODY_BYTES:
            raise InputError(
                f"{type(call).__name__} takes {len(body)} bytes; over HTTP a call has {BODY_BYTES} at most",
                hint="make several calls of it, or publish what is large to the pool",
            )
        connection = self._connection(timeout)
        try:
            connection.request("POST", PATH, body, self._headers)
            response = connection.getresponse()
            answer = response.read()
        except BaseException as error:
            connection.close()
            if not isinstance(error, (OSError, http.client.HTTPException)):
                raise
            self.close()  # the others were to the same process
            raise Unknown(f"no answer from {self._where}: {error}") from None
        self._idle.append(connection)
        if response.status == 503:
            raise Unknown(f"the coordinator at {self._where} is not serving: {_reason(answer)}")
        if response.headers.get_content_type() == "text/plain":
            refusal = answer.decode(errors="replace").strip()[:MESSAGE]
            raise InputError(
                f"{self._where} refused the request ({response.status}): {refusal}",
                hint="check the address and the token",
            )
        return _read(call, response.status == 200, answer)

    def close(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        try:
            connection = self._idle.pop()
        except IndexError:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        return connection


def decode_call(body: bytes, *, json: bool = False) -> m.Call:
    """A call from the wire.

    Raises:
        InputError: it is none, or a field has the wrong type.
    """
    try:
        call: m.Call = (_json_decoder if json else _decoder).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"not a call: {error}") from None
    return call


def answer_wire(coordinator: Coordinator, body: bytes) -> tuple[bool, bytes]:
    """Do an encoded call; returns whether it succeeded, and the encoded answer or error."""
    try:
        with coordinator.inbox.entry() as entry:
            entry.add(calls=1, size=len(body))
            return True, msgspec.msgpack.encode(coordinator.call(decode_call(body)))
    except SpillError as error:
        return False, msgspec.msgpack.encode(told(error))


def told(error: SpillError) -> Told:
    """An error for the wire."""
    message = str(error)
    if len(message) > MESSAGE:
        message = f"{message[:MESSAGE]}..."
    return Told(type(error).__name__, message, error.hint)


def _reason(body: bytes) -> str:
    """Why a coordinator refuses to serve, if it says so."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.msgpack.decode(body, type=Told).message
    return body.decode(errors="replace").strip()[:MESSAGE]


def _read(call: m.Call, succeeded: bool, body: bytes) -> Any:
    try:
        if succeeded:
            return _answers[type(call)].decode(body)
        found = msgspec.msgpack.decode(body, type=Told)
    except msgspec.DecodeError:
        raise InputError(
            f"the answer is not a coordinator's: {body[:80]!r}", hint="check the address"
        ) from None
    kind = getattr(errors, found.error, SpillError)
    if not (isinstance(kind, type) and issubclass(kind, SpillError)):
        kind = SpillError
    raise kind(found.message, hint=found.hint)
