"""The HTTP server, as a process: every refusal is one line, and the coordinator goes on."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving import Server, free_port, serving
from spillover.errors import InputError
from spillover.queue import Client, Task
from spillover.queue import messages as m
from spillover.queue import server as module
from spillover.state import State
from spillover.store import LocalStore

TOKEN = "correct horse battery staple"
MSGPACK = {"Content-Type": "application/msgpack"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "pool", token=TOKEN) as server:
        with Client(server.address, "work", token=TOKEN) as client:
            client.create()
        yield server


@pytest.fixture(autouse=True)
def goes_on(server: Server) -> Iterator[None]:
    """Whatever a test did, a good call is answered afterwards, and soon."""
    yield
    begun = time.monotonic()
    with Client(server.address, "work", token=TOKEN, timeout=5) as client:
        client.submit([Task(f"after {begun}")])
    assert server.process.poll() is None
    assert time.monotonic() - begun < 5


def request(
    server: Server,
    body: bytes = b"",
    headers: dict[str, str] = MSGPACK,
    *,
    method: str = "POST",
    path: str = "/call",
    token: str | None = TOKEN,
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.options.port, timeout=20)
    authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request(method, path, body, {**headers, **authorization})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def raw(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.options.port), timeout=20)


def told(body: bytes) -> dict[str, Any]:
    found = msgspec.json.decode(body) if body.startswith(b"{") else msgspec.msgpack.decode(body)
    assert {"error", "message"} <= {*found}, found
    assert "\n" not in found["message"]
    assert len(found["message"]) <= 1003, found["message"]
    return found


def line(body: bytes) -> str:
    text = body.decode()
    assert text.endswith("\n") and text.count("\n") == 1, text
    assert len(text) < 200
    return text.strip()


@pytest.mark.parametrize("path", ["/call", "/metrics"])
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "Ünïcode"])
def test_a_wrong_token_is_refused(server: Server, path: str, token: str | None) -> None:
    method = "POST" if path == "/call" else "GET"
    encoded = None if token is None else token.encode().decode("latin-1")
    status, body = request(server, b"", method=method, path=path, token=encoded)
    assert status == 401
    assert "token" in line(body)


def test_a_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return False

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    guarded = module._guarded(None, TOKEN)
    scope = {"type": "http", "headers": [(b"authorization", b"Bearer nearly")]}
    coroutine = guarded(module.Request(scope))
    with pytest.raises(module.HTTPException, match="token"):
        coroutine.send(None)
    assert compared == [(b"Bearer nearly", f"Bearer {TOKEN}".encode())]


def test_a_client_with_a_wrong_token_is_told_so(server: Server) -> None:
    with Client(server.address, "work", token="wrong") as client, pytest.raises(InputError, match="token"):
        client.stats()


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/", 404),
        ("POST", "/call/", 404),
        ("POST", "/" + "a" * 3000, 404),
        ("GET", "/call", 405),
        ("DELETE", "/call", 405),
        ("POST", "/metrics", 405),
        ("PUT", "/health", 405),
        ("BREW", "/call", 405),
    ],
)
def test_unknown_paths_and_methods(server: Server, method: str, path: str, expected: int) -> None:
    status, body = request(server, b"", method=method, path=path)
    assert status == expected
    line(body)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "a" * 3000, "/", " "])
def test_other_content_types(server: Server, kind: str) -> None:
    status, body = request(server, b"{}", {"Content-Type": kind})
    assert status == 415
    assert "application/json" in line(body)


@pytest.mark.parametrize("headers", [MSGPACK, {}, {"Content-Type": "application/msgpack; charset=x"}])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\xff" * 1000,
        b"{}",
        b"\x81\xa4type\xa6Submit",
        b"\x81\xa4type\xa9Elsewhere",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffx",
        os.urandom(200),
    ],
)
def test_garbage_messagepack(server: Server, headers: dict[str, str], body: bytes) -> None:
    status, answer = request(server, body, headers)
    assert status == 400
    assert told(answer)["error"] == "InputError"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nil",
        b"[]",
        b"\xff\xfe",
        b'{"type":"Submit"}',
        b'{"type":"Elsewhere","queue":"work"}',
        b'{"type":"Submit","queue":"work","tasks":[{"id":"a","metadata":"\xed\xa0\x80"}]}',
        b'{"type":"Submit","queue":"work","tasks":[{"id":"\\ud800"}]}',
        b'{"type":"Acquire","queue":"work","worker":"w","limit":1e999}',
    ],
)
def test_garbage_json(server: Server, body: bytes) -> None:
    status, answer = request(server, body, JSON)
    assert status == 400
    assert told(answer)["error"] == "InputError"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"queue": 7, "tasks": []}, "queue"),
        ({"queue": "work", "tasks": "all"}, "tasks"),
        ({"queue": "work", "tasks": [{"id": None}]}, "id"),
        ({"queue": "work", "tasks": [{"id": "a", "rank": "first"}]}, "rank"),
        ({"queue": "work", "tasks": [{"id": "a", "rank": 1.5}]}, "rank"),
        ({"queue": "work", "tasks": [{"id": "a", "input": "elsewhere"}]}, "input"),
        ({"queue": "work", "tasks": [{"id": "a", "input": {"pool": 1}}]}, "input"),
    ],
)
@pytest.mark.parametrize("headers", [MSGPACK, JSON])
def test_wrong_types_are_named(
    server: Server, headers: dict[str, str], fields: dict[str, Any], named: str
) -> None:
    encode = msgspec.json.encode if headers is JSON else msgspec.msgpack.encode
    status, answer = request(server, encode({"type": "Submit", **fields}), headers)
    assert status == 400
    assert named in told(answer)["message"]


@pytest.mark.parametrize("depth", [200, 900, 2000, 100_000])
@pytest.mark.parametrize("headers", [MSGPACK, JSON])
def test_deep_nesting(server: Server, headers: dict[str, str], depth: int) -> None:
    ident = f"deep {depth} {headers is JSON}"
    if headers is JSON:
        nested = b"[" * depth + b"]" * depth
        body = b'{"type":"Submit","queue":"work","tasks":[{"id":"%s","metadata":%s}]}'
        status, answer = request(server, body % (ident.encode(), nested), headers)
    else:
        empty = msgspec.msgpack.encode(m.Submit(queue="work", tasks=[Task(ident, metadata=[])]))
        body = empty.replace(b"metadata\x90", b"metadata" + b"\x91" * depth + b"\x90")
        status, answer = request(server, body, headers)
    if status == 200:
        status, answer = request(
            server, msgspec.msgpack.encode(m.ReadTask(queue="work", task=ident)), MSGPACK
        )
        assert status == 200
        assert depth < 1000
    else:
        assert status == 400, answer
        told(answer)


@pytest.mark.parametrize(
    "number",
    [1 << 63, (1 << 64) - 1, -(1 << 63) - 1, 1 << 200, 10**4000, -1],
    ids=["63", "64", "-63", "200", "4000 digits", "-1"],
)
@pytest.mark.parametrize(
    "fields",
    [
        '"type":"Submit","tasks":[{"id":"huge","rank":%d}]',
        '"type":"Submit","tasks":[{"id":"huge","stage":%d}]',
        '"type":"Submit","tasks":[{"id":"huge","max_attempts":%d}]',
        '"type":"Acquire","worker":"w","limit":%d',
        '"type":"Renew","leases":[[%d,1]]',
        '"type":"Complete","results":[{"number":%d,"attempt":1}]',
        '"type":"OpenConsumer","consumer":"huge","start":%d',
        '"type":"ReadLog","start":%d',
        '"type":"ReadLog","limit":%d',
        '"type":"ListTasks","after":%d',
        '"type":"ListTasks","limit":%d',
        '"type":"Trim","position":%d',
    ],
)
def test_huge_integers(server: Server, fields: str, number: int) -> None:
    status, answer = request(server, ('{"queue":"work",' + fields % number + "}").encode(), JSON)
    assert status in (200, 400, 409), answer
    if status != 200:
        told(answer)
    else:
        assert number == -1 or "Renew" in fields


def test_a_bad_call_does_not_spoil_the_others_of_its_group(server: Server) -> None:
    """Calls that meet share a commit; what is wrong with one is that one's."""
    bad = b'{"type":"Submit","queue":"work","tasks":[{"id":"spoilt","rank":99999999999999999999}]}'
    over, refused = threading.Event(), []

    def spoil() -> None:
        while not over.is_set():
            refused.append(request(server, bad, JSON)[0])

    spoilers = [threading.Thread(target=spoil) for _ in range(3)]
    for thread in spoilers:
        thread.start()
    try:
        with Client(server.address, "work", token=TOKEN) as client:
            for number in range(50):
                client.submit([Task(f"unspoilt {number}")])
    finally:
        over.set()
        for thread in spoilers:
            thread.join(20)
    assert {*refused} == {400}


def test_an_oversized_body_is_cut_off(server: Server) -> None:
    body = b"\x00" * (module.BODY_BYTES + 1)
    with raw(server) as connection:
        connection.sendall(_head(f"Content-Length: {1 << 40}"))
        with contextlib.suppress(OSError):
            for start in range(0, len(body), 1 << 20):
                connection.sendall(body[start : start + (1 << 20)])
        answer = _answer(connection)
    assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert "16 MiB" in line(answer.partition(b"\r\n\r\n")[2])


def test_an_oversized_body_without_a_length_is_cut_off(server: Server) -> None:
    with raw(server) as connection:
        connection.sendall(_head("Transfer-Encoding: chunked"))
        piece = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        with contextlib.suppress(OSError):
            for _ in range((module.BODY_BYTES >> 20) + 1):
                connection.sendall(piece)
        assert _answer(connection).startswith(b"HTTP/1.1 413 ")


def test_an_oversized_call_is_not_even_sent(server: Server) -> None:
    with Client(server.address, "work", token=TOKEN) as client, pytest.raises(InputError, match="at most"):
        client.submit([Task("large", metadata="x" * (module.BODY_BYTES + 1))])


def test_memory_does_not_grow_with_unauthorised_bodies(server: Server) -> None:
    """Whoever has no token is refused before anything of the body is kept."""
    before = _resident(server)
    for _ in range(4):
        with raw(server) as connection:
            connection.sendall(b"POST /call HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
            with contextlib.suppress(OSError):
                for _ in range(32):
                    connection.sendall(bytes(1 << 20))
            answer = _answer(connection)
            assert not answer or answer.startswith(b"HTTP/1.1 401 ")
    assert _resident(server) - before < 32 << 20


def test_slow_clients_are_given_up(server: Server, tmp_path: Path) -> None:
    """A body that does not come, a head that does not, and what goes on after a refusal."""
    script = (
        "import spillover.queue.connection as c, spillover.queue.server as s, serving\n"
        "s.BODY_SECONDS = 1.0\n"
        "c.QUIET_SECONDS = 2.0\n"
        "serving.main()\n"
    )
    options = msgspec.structs.replace(
        server.options, pool=str(tmp_path / "pool"), port=free_port(), token=None
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, msgspec.json.encode(options).decode()],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        _trickle(
            options.port, b"POST /call HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b"408", 1, 3
        )
        _trickle(options.port, b"POST /call HTTP/1.1\r\nHost: x\r\nA: ", b"", 0, 2)
        _trickle(options.port, b"", b"", 0, 2)
        _trickle(options.port, b"GET /call HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b"405", 0, 2)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_clients_that_disconnect_in_the_middle(server: Server) -> None:
    body = msgspec.msgpack.encode(m.Submit(queue="work", tasks=[Task("cut")]))
    whole = _head(f"Content-Length: {len(body)}") + body
    for cut in range(0, len(whole) + 1, 7):
        for abrupt in (False, True):
            with raw(server) as connection:
                connection.sendall(whole[:cut])
                if abrupt:  # a reset instead of an end
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_many_idle_connections(server: Server) -> None:
    """Connections that say nothing, or only half of a request, keep nobody from being served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        for number in range(1500):
            connection = stack.enter_context(raw(server))
            if number % 3 == 1:
                connection.sendall(b"POST /call HTTP/1.1\r\nHost: x\r\n")
            elif number % 3 == 2:
                connection.sendall(_head("Content-Length: 10") + b"12")
        begun = time.monotonic()
        with Client(server.address, "work", token=TOKEN, timeout=10) as client:
            for number in range(20):
                client.submit([Task(f"among idle {number}")])
        assert time.monotonic() - begun < 5
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_pipelined_requests_and_a_bad_request_line(server: Server) -> None:
    with raw(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        found = b""
        while found.count(b"generation") < 3:
            piece = connection.recv(4096)
            assert piece
            found += piece
    for bad in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nno field\r\n\r\n",
        b"A" * 100_000 + b"\r\n\r\n",
    ):
        with raw(server) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(bad)
            answer = _until_closed(connection)
            assert not answer or answer.startswith(b"HTTP/1.1 400 "), (bad[:20], answer[:100])


def test_metrics_are_what_prometheus_reads(server: Server) -> None:
    name = 'odd "queue" \\ with\nlines'
    with Client(server.address, name, token=TOKEN) as client:
        client.create()
        client.submit([Task("one"), Task("two")])
        (lease,) = client.acquire("w").leases
        client.complete(lease)
    status, body = request(server, method="GET", path="/metrics", headers={})
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    tasks = {
        (sample.labels["queue"], sample.labels["status"]): sample.value
        for sample in families["spill_tasks"].samples
    }
    assert tasks[name, "pending"] == 1
    assert tasks[name, "completed"] == 1
    accepted = {sample.labels["queue"]: sample.value for sample in families["spill_accepted"].samples}
    assert accepted[name] == 1
    assert families["spill_calls"].type == "counter"
    commits = {sample.name: sample.value for sample in families["spill_commit_seconds"].samples}
    assert commits["spill_commit_seconds_count"] >= 4
    assert 0 < commits["spill_commit_seconds_sum"] < 600
    for family in families.values():
        assert family.documentation, family.name


def test_health_needs_no_token(server: Server) -> None:
    assert request(server, method="GET", path="/health", token=None) == (200, b"generation 1\n")


def test_json_and_messagepack_say_the_same(server: Server) -> None:
    call = m.ReadStats(queue="work")
    _, packed = request(server, msgspec.msgpack.encode(call), MSGPACK)
    _, text = request(server, msgspec.json.encode(call), JSON)
    assert msgspec.msgpack.decode(packed, type=m.Stats) == msgspec.json.decode(text, type=m.Stats)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_gracefully(server: Server, tmp_path: Path, number: int) -> None:
    """Idle clients do not hold it up, the call in progress is answered, and the ownership is given up."""
    with serving(tmp_path / "pool") as stopping, raw(stopping), Client(stopping.address) as client:
        client.create()
        stopping.signal(number)
        begun = time.monotonic()
        assert stopping.process.wait(20) == 0, stopping.process.stderr.read()
        assert time.monotonic() - begun < 5
        assert stopping.process.stderr.read() == b""
    document = State(LocalStore(tmp_path / "pool" / "owner")).read()
    assert document.status == "idle"


def test_a_hanging_client_delays_the_end_by_ten_seconds_at_most(server: Server, tmp_path: Path) -> None:
    with serving(tmp_path / "pool") as stopping, raw(stopping) as hanging:
        hanging.sendall(b"POST /call HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12")
        assert request(stopping, method="GET", path="/health")[0] == 200
        status, _, seconds = stopping.stop()
        assert status == 0
        assert seconds < 13
    document = State(LocalStore(tmp_path / "pool" / "owner")).read()
    assert document.status == "idle"


def _head(field: str) -> bytes:
    return f"POST /call HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{field}\r\n\r\n".encode()


def _trickle(port: int, head: bytes, status: bytes, answered: float, closed: float) -> None:
    """Send a byte now and then after ``head``; the answer and the end come after so many seconds."""
    begun, answer, ended = time.monotonic(), b"", False
    with socket.create_connection(("127.0.0.1", port), timeout=0.1) as connection:
        connection.sendall(head)
        while not ended and time.monotonic() - begun < closed + 5:
            if head:
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")
            try:
                piece = connection.recv(4096)
            except TimeoutError:
                continue
            except ConnectionError:
                piece = b""
            if piece and not answer:
                assert answered - 0.1 < time.monotonic() - begun < answered + 2
            answer, ended = answer + piece, not piece
    assert closed - 0.1 < time.monotonic() - begun < closed + 2
    assert answer.split()[1:2] == ([status] if status else [])


def _answer(connection: socket.socket) -> bytes:
    """The first answer, whether the connection is closed after it or not; empty if it was reset."""
    response = http.client.HTTPResponse(connection)
    try:
        response.begin()
    except (ConnectionError, http.client.HTTPException):
        return b""
    head = f"HTTP/1.1 {response.status} {response.reason}\r\n\r\n".encode()
    return head + response.read()


def _until_closed(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def _resident(server: Server) -> int:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()
