"""A model hub on 127.0.0.1: the part of the Hugging Face protocol that a download uses, with faults.

Model info with file sizes and hashes, ``resolve`` with its headers, the redirect of large files to another
host, byte ranges, error codes in ``X-Error-Code``.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Repo:
    """One repository: its current commit and the files of every commit."""

    commit: str
    files: dict[str, bytes]
    token: str | None = None
    gated: bool = False
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision in ("main", self.commit):
            return self.commit, self.files
        return (revision, self.history[revision]) if revision in self.history else None


@dataclass(frozen=True)
class Call:
    """One request that arrived."""

    method: str
    path: str
    range: str | None
    token: str | None
    host: str | None


@dataclass
class Hub:
    """The server's content, the requests it saw, and the faults it plays."""

    endpoint: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)  # file -> bytes after which every answer breaks off
    cut_once: dict[str, int] = field(default_factory=dict)
    stall: dict[str, int] = field(default_factory=dict)  # file -> bytes after which the answer hangs
    corrupt: set[str] = field(default_factory=set)
    refuse: int | None = None  # a status for every request
    stalled: threading.Event = field(default_factory=threading.Event)

    def gets(self, name: str) -> list[Call]:
        """The requests that asked for the content of a file."""
        return [call for call in self.calls if call.method == "GET" and call.path.endswith(f"/{name}")]


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.stalled.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.state.calls.append(
            Call(self.command, path, self.headers.get("Range"), token, self.headers.get("Host"))
        )
        if self.state.refuse:
            return self._fail(self.state.refuse)
        if path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            return self._info(name, revision or "main", token)
        if path.startswith("/cdn/"):
            return self._content(*path.removeprefix("/cdn/").rsplit("/", 2))
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        return self._resolve(name, *rest.split("/", 1), token)

    def _repo(self, name: str, revision: str, token: str | None) -> tuple[str, dict[str, bytes]] | None:
        repo = self.state.repos.get(name)
        if repo is None or (repo.token and token is None):
            self._fail(404 if token else 401, "RepoNotFound")
        elif repo.gated and token != repo.token:
            self._fail(403, "GatedRepo")
        elif (found := repo.at(revision)) is None:
            self._fail(404, "RevisionNotFound")
        else:
            return found
        return None

    def _info(self, name: str, revision: str, token: str | None) -> None:
        found = self._repo(name, revision, token)
        if found is None:
            return
        commit, files = found
        siblings: list[dict[str, Any]] = []
        for file, data in files.items():
            entry: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": _blob(data)}
            if file.endswith(".safetensors"):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        self._send(
            200, json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode()
        )

    def _resolve(self, name: str, revision: str, file: str, token: str | None) -> None:
        found = self._repo(name, revision, token)
        if found is None:
            return None
        commit, files = found
        if file not in files:
            return self._fail(404, "EntryNotFound")
        data = files[file]
        if file.endswith(".safetensors"):  # large files live on another host, as on the real hub
            headers = {
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Linked-Size": str(len(data)),
                "Location": self.state.endpoint.replace("127.0.0.1", "localhost")
                + f"/cdn/{name}/{commit}/{file}",
            }
            return self._send(302, b"", headers)
        return self._send(
            200, self._played(file, data), {"X-Repo-Commit": commit, "ETag": f'"{_blob(data)}"'}, file
        )

    def _content(self, name: str, commit: str, file: str) -> None:
        found = self.state.repos[name].at(commit)
        assert found is not None
        self._send(200, self._played(file, found[1][file]), {"ETag": '"cdn"'}, file)

    def _played(self, file: str, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if file in self.state.corrupt else data

    def _fail(self, status: int, code: str | None = None) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, file: str = "") -> None:
        wanted = self.headers.get("Range")
        if wanted and file:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers = {**(headers or {}), "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
            status, data = 206, data[start:]
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self._body(file, data)

    def _body(self, file: str, data: bytes) -> None:
        limit = self.state.cut_once.pop(file, self.state.cut.get(file))
        if limit is not None:
            self.wfile.write(data[:limit])
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif file in self.state.stall:
            self.wfile.write(data[: self.state.stall[file]])
            self.wfile.flush()
            self.state.stalled.wait()
            self.close_connection = True
        else:
            self.wfile.write(data)


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
