"""``spill serve`` in a process of its own, on a tiny random model, as its clients see it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families

SPILL = Path(sys.executable).with_name("spill")
SECONDS = 60.0
"""The longest that a test waits for anything of a server; a machine under load needs many."""
LONG = {"max_position_embeddings": 8192}
"""A context in which an answer takes seconds."""


@dataclass
class Running:
    """A server. Leaving it, a context manager, kills the process."""

    model: str
    home: Path
    log: Path
    options: tuple[str, ...] = ()
    token: str | None = None
    threads: int = 1
    url: str = ""
    process: Any = None
    events: list[dict[str, Any]] = field(default_factory=list)

    def start(self) -> Running:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPILL_")}
        environment = kept | {"SPILL_HOME": str(self.home), "OMP_NUM_THREADS": str(self.threads)}
        if self.token is not None:
            environment["SPILL_TOKEN"] = self.token
        words = ["serve", self.model, "--port", "0", "--numerics", "float32", *self.options]
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                [SPILL, *words], env=environment, stdout=subprocess.PIPE, stderr=errors, cwd=self.home.parent
            )
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == "start":
                self.url = self.events[-1]["url"]
                return self
        raise AssertionError(f"the server ended: {self.log.read_text()}")

    def __enter__(self) -> Running:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(SECONDS)
        self.process.stdout.close()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the process and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=self.token or "none", max_retries=0, timeout=SECONDS)

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers: dict[str, Any] = {"Content-Type": "application/json"} | more.pop("headers", {})
        return httpx2.post(f"{self.url}{path}", content=data, headers=headers, timeout=SECONDS, **more)

    def figures(self) -> dict[str, float]:
        """The metrics without labels."""
        headers = {"Authorization": f"Bearer {self.token}"}
        text = httpx2.get(f"{self.root}/metrics", headers=headers, timeout=SECONDS).text
        families = text_string_to_metric_families(text)
        return {one.name: one.value for family in families for one in family.samples if not one.labels}

    def idle(self) -> bool:
        """Whether no row runs or waits."""
        now = self.figures()
        return not (now["spill_serve_running_rows"] or now["spill_serve_open_rows"])


def eventually(true: Callable[[], Any], otherwise: str = "") -> None:
    """Look until something is true."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.02)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def batch_file(path: Path, rows: int, model: str | None = None, **body: Any) -> Path:
    """Rows of a batch with ids of their own."""
    named = {} if model is None else {"model": model}
    with path.open("w") as file:
        for number in range(rows):
            messages = ask(f"Number {number}, the capital of France")
            row = {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions",
                   "body": {"messages": messages, "max_tokens": 3 + number % 7, **named, **body}}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    return path


@contextlib.contextmanager
def pieces(stream: Any) -> Iterator[list[Any]]:
    """The chunks of a stream."""
    with stream:
        yield [*stream]
