"""Crowds, clients that leave or hang, tokens, and how a server ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx2
import openai
import pytest

from crowd import crowd
from served import SPILL, Running, ask, eventually
from spillover.http.serving import bind
from spillover.serve.server import SAVE_SECONDS

SLOW = {"max_tokens": 8000, "temperature": 0, "stop": ["never to be said"]}
"""An answer that takes seconds: greedy, this model goes round in circles."""


@pytest.fixture
def name(tiny: Path) -> str:
    return str(tiny)


def first_piece(server: Running, name: str, **more):
    """A stream that has begun."""
    stream = server.client.completions.create(model=name, prompt="Hi", stream=True, **(SLOW | more))
    next(iter(stream))
    return stream


def test_a_client_that_leaves_frees_its_slot(server, name):
    stream = first_piece(server, name)
    assert server.figures()["spill_serve_running_rows"] == 1
    stream.close()
    begun = time.monotonic()
    eventually(server.idle)
    assert time.monotonic() - begun < 5


def test_a_client_that_leaves_before_its_whole_answer_frees_its_slot(server, name):
    with pytest.raises(openai.APITimeoutError):
        server.client.with_options(timeout=0.5).completions.create(model=name, prompt="Hi", **SLOW)
    eventually(server.idle)


def test_a_client_that_takes_nothing_keeps_no_slot(server, name):
    """Its answer goes on to its end, and the connection is all that is left."""
    host, port = server.root.removeprefix("http://").split(":")
    body = json.dumps({"model": name, "prompt": "Hi", "stream": True, **SLOW, "max_tokens": 3000})
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        eventually(lambda: server.figures()["spill_serve_running_rows"] == 1)
        eventually(lambda: server.figures()["spill_serve_running_rows"] == 0)
        others = server.client.completions.create(model=name, prompt="Hi", max_tokens=3)
        assert others.usage.completion_tokens == 3
    eventually(server.idle)


@pytest.mark.slow
def test_a_crowd_of_which_some_leave(serving, name):
    """64 clients that stream, every third of whom goes away in the middle: nothing sticks, nothing grows."""
    server = serving("--batch", "32", "--queue", "64")
    crowd(server.url, name, clients=64, seconds=2)
    eventually(server.idle)
    before = resident(server)
    found = crowd(server.url, name, clients=64, seconds=8)
    assert found.finished > 64 and found.left > 32
    assert found.wrong == []
    eventually(server.idle)
    assert server.figures()["spill_serve_waiting_rows"] == 0
    assert resident(server) - before < 64 << 20


def resident(server: Running) -> int:
    """Bytes of a server's process that are in memory now."""
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_too_many_are_told_to_try_again(serving, name):
    server = serving("--batch", "1", "--queue", "1")
    with (
        first_piece(server, name),
        server.client.completions.create(model=name, prompt="Hi", stream=True, max_tokens=5) as waiting,
    ):
        refused = server.post("/completions", {"model": name, "prompt": "Hi"})
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        assert server.figures()["spill_serve_waiting_rows"] == 1
        impossible = server.post("/completions", {"model": name, "prompt": "Hi", "n": 3})
        assert impossible.status_code == 400
    assert waiting is not None
    eventually(server.idle)
    assert server.post("/completions", {"model": name, "prompt": "Hi"}).status_code == 200


def test_tokens(serving, name, tmp_path):
    server = serving(token="correct horse")
    assert [model.id for model in server.client.models.list()] == [name]
    assert "correct horse" not in json.dumps(server.events) + server.log.read_text()
    assert httpx2.get(f"{server.root}/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/v1/files", "/v1/batches/x"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "correct horse"}):
            answer = httpx2.get(f"{server.root}{path}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert server.post("/chat/completions", {}, headers={"Authorization": b"Bearer \xff"}).status_code == 401


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_what_is_under_way_finish(serving, name, number):
    server = serving()
    stream = server.client.completions.create(
        model=name, prompt="Hi", stream=True, temperature=0, max_tokens=2000
    )
    events = iter(stream)
    next(events)
    server.process.send_signal(number)
    eventually(lambda: httpx2.get(f"{server.root}/health").status_code == 503)
    refused = server.post("/completions", {"model": name, "prompt": "Hi"})
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert [chunk.choices[0].finish_reason for chunk in events][-1] in ("length", "stop")
    assert server.process.wait(20) == 0
    assert json.loads(server.process.stdout.read().splitlines()[-1])["event"] == "done"
    assert server.log.read_text().count("\n") == 1  # the line at the start


@pytest.mark.slow
def test_after_the_grace_whoever_still_waits_is_told(serving, name):
    server = serving("--grace", "0.5")
    stream = first_piece(server, name, max_tokens=8100)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="the server is ending"):
        list(stream)
    assert server.process.wait(20) == 0
    assert time.monotonic() - begun < 10


@pytest.mark.slow
def test_the_end_takes_no_longer_than_the_grace_and_a_save(serving, name, tmp_path):
    """A batch that cannot end in time is saved and continues with the next start."""
    server = serving("--grace", "2", "--batch", "1")
    rows = tmp_path / "rows.jsonl"
    body = {"messages": [{"role": "user", "content": "Hi"}], "model": name, **SLOW}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    rows.write_text("".join(json.dumps(line | {"custom_id": str(n)}) + "\n" for n in range(20)))
    file = server.client.files.create(file=rows, purpose="batch")
    batch = server.client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    eventually(lambda: server.figures()["spill_serve_running_rows"] == 1)
    begun = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begun < 2 + SAVE_SECONDS + 2
    again = serving("--grace", "2", "--batch", "1")
    assert again.client.batches.retrieve(batch.id).status in ("validating", "in_progress")


def test_a_second_signal_ends_at_once(serving, name):
    server = serving("--grace", "60")
    stream = first_piece(server, name)
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: httpx2.get(f"{server.root}/health").status_code == 503)
    begun = time.monotonic()
    assert server.stop(signal.SIGTERM) == 0
    assert time.monotonic() - begun < 5
    with contextlib.suppress(Exception):
        stream.close()


def test_the_start_is_one_line(server, name):
    (event,) = [event for event in server.events if event["event"] == "start"]
    assert "8 rows at a time of up to 8,192 tokens; at http://127.0.0.1:" in event["message"]
    assert event["models"] == [name, f"{name}+a", f"{name}+b"]
    assert "resident on cpu in float32" in event["message"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--batch", "0"), "--batch 0 makes no sense"),
        (("--context", "1"), "--context 1 makes no sense"),
        (("--host", "0.0.0.0"), "0.0.0.0 is open to others. Try: set SPILL_TOKEN first"),
        (("--host", "203.0.113.7", "--token", "x"), "203.0.113.7 port 0 cannot be listened at"),
        (("--port", "99999"), "cannot be listened at"),
        (("--token-file", "missing"), "missing: No such file or directory"),
        (("--state", "/proc/none"), "/proc/none cannot be written"),
    ],
)
def test_mistakes_cost_a_line(tiny, home, tmp_path, words, says):
    code, err = run(str(tiny), home, tmp_path, *words)
    assert code == 1
    assert says in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("spill: ")


@pytest.mark.parametrize(
    ("suffix", "says"),
    [("+a+a", "names a twice"), ("+c", "there is no adapter 'c'")],
)
def test_mistakes_in_names_cost_a_line(tiny, home, tmp_path, suffix, says):
    code, err = run(f"{tiny}{suffix}", home, tmp_path)
    assert (code, says in err) == (1, True)


def test_a_taken_port_and_a_taken_folder(server, tiny, home, tmp_path):
    port = server.root.rpartition(":")[2]
    code, err = run(str(tiny), home, tmp_path, "--port", port)
    assert (code, f"port {port} cannot be listened at" in err) == (1, True)
    state = server.options[server.options.index("--state") + 1]
    code, err = run(str(tiny), home, tmp_path, "--state", state)
    assert (code, f"another server keeps its files in {state}" in err) == (1, True)


def run(model: str, home: Path, folder: Path, *words: str) -> tuple[int, str]:
    environment = os.environ | {"SPILL_HOME": str(home)}
    done = subprocess.run(
        [SPILL, "serve", model, "--port", "0", *words],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_bodies_that_do_not_come_hold_nothing_but_their_connections(server, name):
    host, port = server.root.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        threads = [threading.Thread(target=server.post, args=("/completions", {})) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.idle()
        assert server.client.chat.completions.create(model=name, messages=ask("x"), max_tokens=1)


def test_a_small_answer_is_not_held_back():
    """asyncio turns Nagle's algorithm off for connections of a socket that names TCP, and for no other."""
    with contextlib.closing(bind("127.0.0.1", 0)) as bound, socket.create_connection(bound.getsockname()):
        accepted, _ = bound.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
