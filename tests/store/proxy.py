"""An HTTP proxy in front of a real server that answers some requests badly."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

#: What to do with a request: forward it, answer a status instead, or act and then cut the connection.
FORWARD, BEFORE, AFTER, CONFLICT, SILENT = "forward", "503", "cut", "409", "silent"


class FaultProxy:
    """Forwards to ``target``; ``rule(method, path, headers)`` chooses what happens to each request."""

    def __init__(self, target: str, rule: Callable[[str, str, dict[str, str]], str]) -> None:
        self.seen: list[str] = []
        outer, address = self, urlsplit(target)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                return

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                fate = rule(self.command, self.path, headers)
                outer.seen.append(f"{self.command} {fate}")
                if fate in (BEFORE, CONFLICT):
                    self.answer(int(fate), [], b"")
                    return
                upstream = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
                upstream.request(self.command, self.path, body, dict(self.headers.items()))
                response = upstream.getresponse()
                data = response.read()
                upstream.close()
                if fate == SILENT:
                    time.sleep(3)
                if fate in (AFTER, SILENT):
                    self.close_connection = True
                    return
                self.answer(response.status, response.getheaders(), data)

            def answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in (
                        "connection",
                        "transfer-encoding",
                        "content-length",
                        "date",
                        "server",
                    ):
                        self.send_header(name, value)
                length = {name.lower(): value for name, value in headers}.get(
                    "content-length", str(len(data))
                )
                self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def conditional_puts(fates: list[str]) -> Callable[[str, str, dict[str, str]], str]:
    """A rule that applies ``fates`` in turn to writes that carry a precondition, then forwards."""
    lock = threading.Lock()

    def rule(method: str, path: str, headers: dict[str, str]) -> str:
        if method != "PUT" or not ({"if-match", "if-none-match"} & headers.keys()):
            return FORWARD
        with lock:
            return fates.pop(0) if fates else FORWARD

    return rule
