"""A shell with a tiny model and data, and the results of jobs that nothing interrupted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli.command import RUN, TUNE, Outcome, Shell, shell_in
from models.folders import tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def shell(tmp_path: Path, model: Path) -> Iterator[Shell]:
    shell = shell_in(tmp_path, model)
    yield shell
    for process in shell.started:
        if process.child.poll() is None:
            process.child.kill()
            process.child.wait()


@dataclass(frozen=True)
class Whole:
    """A shell in which `TUNE` and `RUN` were typed and ran to their ends. Tests must not change it.

    `posted` is what ``--notify`` sent: content type and document.
    """

    shell: Shell
    tune: Outcome
    run: Outcome
    posted: list[tuple[str, Any]]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Whole:
    shell = shell_in(tmp_path_factory.mktemp("whole"), model)
    with Listener() as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        tune, run = (shell.start(*words, "--notify", listener.url) for words in (TUNE, RUN))
        whole = Whole(shell, tune.end(), run.end(), listener.posted)
        listener.shutdown()
        thread.join()
    return whole


class Listener(HTTPServer):
    """Keeps what is posted to it."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/done"


class Handler(BaseHTTPRequestHandler):
    server: Listener

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.headers["Content-Type"], json.loads(body)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass
