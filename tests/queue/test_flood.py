"""More calls than a coordinator takes: some are refused, in one line, and memory stays bounded."""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from queued import Place
from serving import Server, serving
from spillover.errors import Busy, InputError
from spillover.pool import Pool
from spillover.queue import Client, Coordinator, Task
from spillover.queue import messages as m
from spillover.queue.inbox import SMALL, Inbox
from spillover.queue.transport import BODY_BYTES, RayTransport, decode_call
from wire import MSGPACK, SOON, TOKEN, first_answer, head, raw, request, resident, told


def test_an_inbox_counts_calls_and_bytes() -> None:
    inbox = Inbox(max_calls=2, max_bytes=2 * SMALL)
    with inbox.entry() as one, inbox.entry() as two, inbox.entry() as three:
        one.add(calls=1, size=SMALL)
        one.add(size=SMALL // 2)
        two.add(calls=1)
        with pytest.raises(Busy, match="the coordinator is busy: 2 calls wait, and 2 may"):
            three.add(calls=1)
        with pytest.raises(Busy, match=rf"calls of {SMALL * 3 // 2} bytes wait, and {2 * SMALL} may"):
            three.add(size=SMALL + 1)
        three.add(size=SMALL)  # small enough to come in
        assert (inbox.calls, inbox.bytes, inbox.refused) == (2, SMALL * 5 // 2, 2)
    assert (inbox.calls, inbox.bytes, inbox.refused) == (0, 0, 2)


def test_threads_of_one_process_are_refused_and_try_again(tmp_path: Path) -> None:
    with Pool.open(tmp_path, create=True) as pool, Coordinator(pool, max_waiting=2) as coordinator:
        client = Client(coordinator, "work")
        client.create()
        done: list[int] = []
        threads = [
            threading.Thread(target=lambda n=n: done.append(client.submit([Task(f"task {n}")]).added))
            for n in range(8)
        ]
        with coordinator.owners.catalogue.reading():  # whoever commits has to wait
            for thread in threads:
                thread.start()
            end = time.monotonic() + SOON
            while coordinator.inbox.refused < 20:  # those who came later, again and again
                assert time.monotonic() < end
                time.sleep(0.001)
            assert coordinator.inbox.calls == 2
            with Client(coordinator, "work") as hasty, pytest.raises(Busy) as caught:
                hasty.timeout = 0.1
                hasty.stats()
        for thread in threads:
            thread.join(SOON)
        assert str(caught.value) == ("the coordinator is busy: 2 calls wait, and 2 may; given up after 0.1 s")
        assert done == [1] * 8
        assert client.stats().pending == 8
        assert coordinator.inbox.calls == 0


@pytest.fixture
def narrow(tmp_path: Path) -> Any:
    with serving(tmp_path / "pool", token=TOKEN, max_waiting=4, max_waiting_bytes=32 << 20) as server:
        with Client(server.address, "work", token=TOKEN) as client:
            client.create()
        yield server


def measured(server: Server, name: str) -> int:
    """A figure of the server, as Prometheus would read it."""
    _, body = request(server, method="GET", path="/metrics", headers={})
    (value,) = re.findall(rf"^{name} (\d+)$", body.decode(), re.MULTILINE)
    return int(value)


def test_a_flood_of_calls_is_refused_in_one_line_each(narrow: Server) -> None:
    """All arrive at once, as after a pause of the machine: who does not fit hears so, the rest happens."""
    sent = []
    narrow.signal(signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        for number in range(200):
            connection = stack.enter_context(
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", narrow.options.port, timeout=60))
            )
            call = m.Submit(queue="work", tasks=[Task(f"flood {number}")])
            token = {"Authorization": f"Bearer {TOKEN}"}
            connection.request("POST", "/call", msgspec.msgpack.encode(call), MSGPACK | token)
            sent.append(connection)
        narrow.signal(signal.SIGCONT)
        statuses: Counter[int] = Counter()
        for connection in sent:
            response = connection.getresponse()
            body = response.read()
            statuses[response.status] += 1
            if response.status != 200:
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
                assert told(body)["error"] == "Busy"
                assert told(body)["message"] == "the coordinator is busy: 4 calls wait, and 4 may"
    assert statuses[200] >= 4
    assert statuses[429] > 20
    with Client(narrow.address, "work", token=TOKEN, timeout=SOON) as client:
        assert client.stats().pending == statuses[200]
    assert measured(narrow, "spill_busy_total") == statuses[429]
    assert measured(narrow, "spill_waiting_calls") == 0


def test_clients_get_through_a_flood(narrow: Server) -> None:
    """Who is refused tries again: 16 clients at once, where 4 calls may wait."""

    def work(number: int) -> None:
        with Client(narrow.address, "work", token=TOKEN, timeout=SOON) as client:
            for turn in range(5):
                client.submit([Task(f"{number} {turn}")])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON)
    with Client(narrow.address, "work", token=TOKEN) as client:
        assert client.stats().pending == 80


def test_memory_is_bounded_while_large_bodies_arrive_and_small_calls_go_on(narrow: Server) -> None:
    """A gigabyte of bodies that never end: what is over the bound is refused, and not kept."""
    before, piece = resident(narrow), bytes(1 << 20)
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            connection = stack.enter_context(raw(narrow))
            connection.sendall(head(f"Content-Length: {BODY_BYTES}"))
            for _ in range(15):
                connection.sendall(piece)
        with Client(narrow.address, "work", token=TOKEN, timeout=SOON) as client:
            assert client.submit([Task("small")]).added == 1
        assert 0 < measured(narrow, "spill_waiting_bytes") <= (32 << 20) + 65 * SMALL
        assert measured(narrow, "spill_busy_total") >= 60
        assert resident(narrow) - before < 100 << 20


def test_a_refused_body_is_read_to_its_end(narrow: Server) -> None:
    """So that a client which first sends everything hears why, and may use its connection again."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(raw(narrow))
            connection.sendall(head(f"Content-Length: {BODY_BYTES}") + bytes(12 << 20))
        body = msgspec.msgpack.encode(m.Submit(queue="work", tasks=[Task("large", metadata="x" * (9 << 20))]))
        end = time.monotonic() + SOON
        while (found := request(narrow, body))[0] != 429:
            assert time.monotonic() < end
        assert told(found[1])["error"] == "Busy"
        with raw(narrow) as connection:
            connection.sendall(head(f"Content-Length: {len(body)}") + body)
            assert first_answer(connection).startswith(b"HTTP/1.1 429 ")
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert first_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_a_call_of_too_many_items_is_refused_before_they_are_made() -> None:
    calls = [
        m.Submit(queue="work", tasks=[Task("a")] * (m.BATCH + 1)),
        m.Acquire(queue="work", worker="w", tasks=["a"] * (m.BATCH + 1)),
        m.Renew(queue="work", leases=[(1, 1)] * (m.BATCH + 1)),
        m.Ack(queue="work", consumer="c", positions=[0] * (m.BATCH + 1)),
    ]
    for call in calls:
        for json, encode in ((False, msgspec.msgpack.encode), (True, msgspec.json.encode)):
            with pytest.raises(InputError, match=f"not a call: .* length <= {m.BATCH}"):
                decode_call(encode(call), json=json)


def test_a_page_is_bounded(place: Place) -> None:
    for limit in (0, -1, 100_001, 1 << 62):
        with pytest.raises(InputError, match=f"a page of {limit} is asked for"):
            place.client.tasks(limit=limit)
        with pytest.raises(InputError, match=f"a page of {limit} is asked for"):
            place.client.log(limit=limit)


@pytest.mark.slow
def test_an_actor_with_too_many_calls_waiting_is_busy() -> None:
    ray = pytest.importorskip("ray")

    class Slow:
        def call(self, body: bytes) -> tuple[bool, bytes]:
            time.sleep(1.0)
            return True, msgspec.msgpack.encode(None)

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        actor = ray.remote(Slow).options(num_cpus=0, max_pending_calls=1).remote()
        heard: list[object] = []

        def call() -> None:
            try:
                heard.append(RayTransport(actor).call(m.Create(queue="work"), SOON))
            except Busy as error:
                heard.append(str(error))

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SOON)
    finally:
        ray.shutdown()
    assert "the coordinator's actor has too many calls of this process waiting" in heard
    assert None in heard
