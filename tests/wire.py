"""Speaking HTTP to a served queue by hand: whole requests, and sockets for what is no request."""

from __future__ import annotations

import contextlib
import http.client
import resource
import socket
from pathlib import Path
from typing import Any

import msgspec

from serving import Server

TOKEN = "correct horse battery staple"
MSGPACK = {"Content-Type": "application/msgpack"}
JSON = {"Content-Type": "application/json"}
SOON = 30.0
"""Seconds that a machine under load may take for what is done at once."""


def request(
    server: Server,
    body: bytes = b"",
    headers: dict[str, str] = MSGPACK,
    *,
    method: str = "POST",
    path: str = "/call",
    token: str | None = TOKEN,
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.options.port, timeout=60)
    authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request(method, path, body, {**headers, **authorization})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def raw(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.options.port), timeout=60)


def told(body: bytes) -> dict[str, Any]:
    """An error as it was told, in one line."""
    found = msgspec.json.decode(body) if body.startswith(b"{") else msgspec.msgpack.decode(body)
    assert {"error", "message"} <= {*found}, found
    assert "\n" not in found["message"]
    assert len(found["message"]) <= 1003, found["message"]
    return found


def line(body: bytes) -> str:
    """A text of one line, without its end."""
    text = body.decode()
    assert text.endswith("\n") and text.count("\n") == 1, text
    assert len(text) < 200
    return text.strip()


def head(field: str) -> bytes:
    """The head of a call with a token and one more field."""
    return f"POST /call HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{field}\r\n\r\n".encode()


def first_answer(connection: socket.socket) -> bytes:
    """The first answer, whether the connection is closed after it or not; empty if it was reset."""
    response = http.client.HTTPResponse(connection)
    try:
        response.begin()
    except (ConnectionError, http.client.HTTPException):
        return b""
    return f"HTTP/1.1 {response.status} {response.reason}\r\n\r\n".encode() + response.read()


def until_closed(connection: socket.socket) -> bytes:
    """Everything up to the end of a connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def resident(server: Server) -> int:
    """Bytes of memory that the server's process has."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()
