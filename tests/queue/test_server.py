"""The HTTP server, as a process: every refusal is one line, and the coordinator goes on."""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving import Server
from spillover.errors import InputError
from spillover.http import serving as module
from spillover.queue import Client, Task
from spillover.queue import messages as m
from wire import JSON, MSGPACK, TOKEN, line, request, told

pytestmark = pytest.mark.usefixtures("goes_on")


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
    guarded = module.guarded(None, TOKEN)
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
        '"type":"Limit","unfinished":%d',
        '"type":"Limit","undelivered":%d',
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
