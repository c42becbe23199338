"""Connections that are slow, large, many or cut: the server serves the others, and ends when told."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serving import Server, free_port, serving
from spillover.errors import InputError
from spillover.queue import Client, Task
from spillover.queue import messages as m
from spillover.queue import server as module
from spillover.state import State
from spillover.store import LocalStore
from wire import SOON, TOKEN, first_answer, head, line, raw, request, resident, until_closed

pytestmark = pytest.mark.usefixtures("goes_on")


def test_an_oversized_body_is_cut_off(server: Server) -> None:
    body = b"\x00" * (module.BODY_BYTES + 1)
    with raw(server) as connection:
        connection.sendall(head(f"Content-Length: {1 << 40}"))
        with contextlib.suppress(OSError):
            for start in range(0, len(body), 1 << 20):
                connection.sendall(body[start : start + (1 << 20)])
        answer = first_answer(connection)
    assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert "16 MiB" in line(answer.partition(b"\r\n\r\n")[2])


def test_an_oversized_body_without_a_length_is_cut_off(server: Server) -> None:
    with raw(server) as connection:
        connection.sendall(head("Transfer-Encoding: chunked"))
        piece = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        with contextlib.suppress(OSError):
            for _ in range((module.BODY_BYTES >> 20) + 1):
                connection.sendall(piece)
        assert first_answer(connection).startswith(b"HTTP/1.1 413 ")


def test_an_oversized_call_is_not_even_sent(server: Server) -> None:
    with Client(server.address, "work", token=TOKEN) as client, pytest.raises(InputError, match="at most"):
        client.submit([Task("large", metadata="x" * (module.BODY_BYTES + 1))])


def test_memory_does_not_grow_with_unauthorised_bodies(server: Server) -> None:
    """Whoever has no token is refused before anything of the body is kept."""
    before = resident(server)
    for _ in range(4):
        with raw(server) as connection:
            connection.sendall(b"POST /call HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
            with contextlib.suppress(OSError):
                for _ in range(32):
                    connection.sendall(bytes(1 << 20))
            answer = first_answer(connection)
            assert not answer or answer.startswith(b"HTTP/1.1 401 ")
    assert resident(server) - before < 32 << 20


@contextlib.contextmanager
def hurried(server: Server, folder: Path) -> Iterator[int]:
    """A server whose time limits are short; yields its port."""
    script = (
        "import spillover.http.connection as c, spillover.queue.server as s, serving\n"
        "s.BODY_SECONDS = 1.0\n"
        "c.QUIET_SECONDS = 2.0\n"
        "serving.main()\n"
    )
    options = msgspec.structs.replace(server.options, pool=str(folder / "pool"), port=free_port(), token=None)
    process = subprocess.Popen(
        [sys.executable, "-c", script, msgspec.json.encode(options).decode()],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        yield options.port
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_slow_clients_are_given_up(server: Server, tmp_path: Path) -> None:
    """A body that does not come, a head that does not, and what goes on after a refusal."""
    with hurried(server, tmp_path) as port:
        _trickle(port, b"POST /call HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b"408", 1, 3)
        _trickle(port, b"POST /call HTTP/1.1\r\nHost: x\r\nA: ", b"", 0, 2)
        _trickle(port, b"", b"", 0, 2)
        _trickle(port, b"GET /call HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b"405", 0, 2)


def test_a_client_that_takes_no_answer_is_given_up_and_a_slow_one_is_not(
    server: Server, tmp_path: Path
) -> None:
    """The rest of an answer that nobody reads is thrown away with its connection."""
    with hurried(server, tmp_path) as port:
        with Client(f"http://127.0.0.1:{port}", "work") as client:
            client.create()
            client.submit([Task("large", metadata="x" * (12 << 20))])
        body = msgspec.msgpack.encode(m.ReadTask(queue="work", task="large"))
        ask = head(f"Content-Length: {len(body)}") + body
        with socket.socket() as deaf, socket.socket() as slow:
            for connection in (deaf, slow):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
                connection.settimeout(SOON)
                connection.connect(("127.0.0.1", port))
                connection.sendall(ask)
            begun, taken = time.monotonic(), 0
            while piece := slow.recv(1 << 20):
                taken += len(piece)
                if time.monotonic() - begun < 3.5:  # a little now and then, for longer than the time limit
                    time.sleep(0.5)
                if taken > 12 << 20:
                    break
            assert taken > 12 << 20
            reset = select.poll()
            reset.register(deaf, select.POLLERR | select.POLLHUP)
            assert reset.poll(SOON * 1000)
            with pytest.raises(ConnectionResetError):
                while deaf.recv(1 << 20):
                    pass


def test_clients_that_disconnect_in_the_middle(server: Server) -> None:
    body = msgspec.msgpack.encode(m.Submit(queue="work", tasks=[Task("cut")]))
    whole = head(f"Content-Length: {len(body)}") + body
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
                connection.sendall(head("Content-Length: 10") + b"12")
        begun = time.monotonic()
        with Client(server.address, "work", token=TOKEN, timeout=SOON) as client:
            for number in range(20):
                client.submit([Task(f"among idle {number}")])
        assert time.monotonic() - begun < SOON
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
            answer = until_closed(connection)
            assert not answer or answer.startswith(b"HTTP/1.1 400 "), (bad[:20], answer[:100])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_gracefully(server: Server, tmp_path: Path, number: int) -> None:
    """Idle clients do not hold it up, the call in progress is answered, and the ownership is given up."""
    with serving(tmp_path / "pool") as stopping, raw(stopping), Client(stopping.address) as client:
        client.create()
        stopping.signal(number)
        begun = time.monotonic()
        assert stopping.process.wait(60) == 0, stopping.process.stderr.read()
        assert time.monotonic() - begun < SOON
        assert stopping.process.stderr.read() == b""
    document = State(LocalStore(tmp_path / "pool" / "owner")).read()
    assert document.status == "idle"


def test_a_hanging_client_delays_the_end_by_ten_seconds_at_most(server: Server, tmp_path: Path) -> None:
    with serving(tmp_path / "pool") as stopping, raw(stopping) as hanging:
        hanging.sendall(b"POST /call HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12")
        assert request(stopping, method="GET", path="/health")[0] == 200
        status, _, seconds = stopping.stop()
        assert status == 0
        assert seconds < 10 + SOON
    document = State(LocalStore(tmp_path / "pool" / "owner")).read()
    assert document.status == "idle"


def _trickle(port: int, head: bytes, status: bytes, answered: float, closed: float) -> None:
    """Send a byte now and then after ``head``; the answer and the end come after so many seconds."""
    begun, answer, ended = time.monotonic(), b"", False
    with socket.create_connection(("127.0.0.1", port), timeout=0.1) as connection:
        connection.sendall(head)
        while not ended and time.monotonic() - begun < closed + SOON:
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
                assert answered - 0.1 < time.monotonic() - begun < answered + SOON
            answer, ended = answer + piece, not piece
    assert closed - 0.1 < time.monotonic() - begun < closed + SOON
    assert answer.split()[1:2] == ([status] if status else [])
